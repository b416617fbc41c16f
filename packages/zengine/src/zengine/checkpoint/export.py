"""Export of whole weights at any stage: streamed to a file, or as a state dict on rank 0.

At stage 3 a weight is whole only while its unit is gathered, so the file is written in the order of the module's
tensors, one gather after the other.  Memory holds a unit and a buffer; rank 0 writes, other ranks take part in the
gathers.  No config key is needed, and every tensor is written.

`module.state_dict()` also works, but holds everything at once.  It alone knows the state-dict hooks of modules (extra
state, changed names); a streamed export has parameters and persistent buffers by their names.

A pipeline's names are those of the whole model, so an export of all stages is one of the model.  The ranks of the
pipeline that begins at rank 0 send their tensors one at a time, and rank 0 goes through its own tensors and then
through theirs, in rank order.  Other copies of the pipeline, and tensor ranks, only take part in their stage's
gathers.  A rank that cannot go through its tensors (out of memory, say) aborts the world, since others wait for its
messages; an error while writing the file does not, since the values are still consumed.

Rejected: one state dict per stage, joined at the end (it must fit in memory); a gather over all stages (every stage
would hold all tensors).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
import zpartition
from zengine.checkpoint.consensus import GroupPeers, on_every_rank
from zengine.checkpoint.weight_files import Entry, write_weights

if TYPE_CHECKING:
    from zengine.engine.parts import Run
    from zpartition import ModelParallelGroup

__all__ = [
    "consolidated_16bit_state_dict",
    "from_all_stages",
    "load_module_state_dict",
    "merge_over_stages",
    "module_state_dict",
    "save_16bit_model",
    "tied_names",
]

Named = tuple[Tensor, tuple[str, ...]]  # a tensor of the module, and its names


def save_16bit_model(run: Run, save_dir: str, save_filename: str, *, trained_only: bool) -> bool:
    """See `DeepSpeedEngine.save_16bit_model`."""
    run.clock.require_open("save_16bit_model")
    peers = GroupPeers.of(run)
    errors: list[Exception] = []
    entries, values = _stream(run, trained_only=trained_only)
    write = partial(write_weights, os.path.join(save_dir, save_filename), entries, values)
    consume: Callable[[], object] = partial(deque, values, 0)  # to the end: other ranks take part in the gathers
    for work in (write, consume) if peers.rank == 0 else (consume,):
        try:
            work()
        except Exception as error:  # of any class: `on_every_rank` raises it on all ranks
            errors.append(error)

    def report() -> bool:
        if errors:
            raise errors[0]
        return True

    return on_every_rank(report, peers, "no weights were written")


def module_state_dict(run: Run, *, trained_only: bool) -> dict[str, Any]:
    """See `DeepSpeedEngine.module_state_dict`."""
    state: dict[str, Any] = run.parts.checkpoints.state_dict(run)
    frozen = {name for name, param in _parameters(run.module) if trained_only and not param.requires_grad}
    return {name: each for name, each in state.items() if name not in frozen}


def load_module_state_dict(run: Run, checkpoint: Mapping[str, Any], *, strict: bool, custom_load_fn: Any) -> None:
    """See `DeepSpeedEngine.load_module_state_dict`."""
    inner = checkpoint.get("module")
    state = inner if isinstance(inner, Mapping) else checkpoint
    if custom_load_fn is None:
        run.parts.checkpoints.load_state_dict(run, state, strict=strict)
        return
    with zpartition.gathered(run.module, modifier_rank=0), torch.no_grad():
        custom_load_fn(src=state, dst=run.module)


def consolidated_16bit_state_dict(run: Run, *, trained_only: bool) -> dict[str, Tensor] | None:
    """Return the weights in their compute dtype on rank 0's CPU; None on other ranks.  All ranks call."""
    run.clock.require_open("_consolidated_16bit_state_dict")
    entries, values = _stream(run, trained_only=trained_only)
    is_first = GroupPeers.of(run).rank == 0
    state: dict[str, Tensor] = {}
    for entry, value in zip(entries, values, strict=True):  # strict: to the end on every rank
        if is_first:
            state.update(dict.fromkeys(entry.names, value.detach().to("cpu", copy=True)))
    return state if is_first else None


def _parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Yield every name of every parameter."""
    yield from module.named_parameters(remove_duplicate=False)


def _tensors(run: Run, *, trained_only: bool) -> list[Named]:
    """Return parameters and persistent buffers in module order, each once, with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}

    def note(name: str, tensor: Tensor) -> None:
        tensors.setdefault(id(tensor), tensor)
        names.setdefault(id(tensor), []).append(name)

    saved = frozenset(run.parts.partition.names())
    for path, child in run.module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, param in child.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad or not trained_only:
                note(prefix + name, param)
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if prefix + name in saved or id(buffer) in tensors:
                note(prefix + name, buffer)
    return [(tensor, tuple(names[key])) for key, tensor in tensors.items()]


def tied_names(run: Run) -> dict[str, str]:
    """Map each further name of a tied weight to its name in checkpoints, over all stages.  A pipeline collective."""
    own = {alias: names[0] for _, names in _tensors(run, trained_only=False) for alias in names[1:]}
    return merge_over_stages(zpartition.pipeline_stages_of(run.module), own)


def _stream(run: Run, *, trained_only: bool) -> tuple[list[Entry], Iterator[Tensor]]:
    """Return the entries to export and an iterator of their values: of all stages on rank 0, else of this rank.

    A collective of a pipeline's ranks; iterating is one too if `_gather` is one, or if there are stages.
    """
    found, full = _tensors(run, trained_only=trained_only), zpartition.FullTensors.of(run.module)
    entries = [Entry(names, full.shape(tensor), tensor.dtype) for tensor, names in found]
    stages = zpartition.pipeline_stages_of(run.module)
    sends = stages.size > 1 and dist.get_process_group_ranks(stages.group)[0] == run.parts.groups.table.min().item()
    return from_all_stages(stages, entries, _gather(found, full), device=run.device, sends=sends)


def _gather(found: list[Named], full: zpartition.FullTensors) -> Iterator[Tensor]:
    """Yield each tensor, whole until the next one.  A collective at stage 3, and if layers are split."""
    for tensor, _ in found:
        if isinstance(tensor, Parameter):
            with zpartition.gathered(tensor):
                yield full(tensor)
        else:
            yield tensor.detach()


# -- pipelines: tensors of all stages on the first rank ------------------------------------------


def from_all_stages(
    stages: ModelParallelGroup,
    entries: Sequence[Entry],
    values: Iterator[Tensor],
    *,
    device: torch.device,
    sends: bool,
) -> tuple[list[Entry], Iterator[Tensor]]:
    """Return the entries and values of the whole model on the first rank, and those of this rank on others.

    All ranks must exhaust the values, since iterating sends them.  A collective of the pipeline.
    stages: ranks of this pipeline.  device: a device that their group can send from.
    sends: the first rank of this pipeline is the one that exports.
    """
    own = list(entries)
    if stages.size == 1:
        return own, values
    rows = zcomm.all_gather_object([_to_row(entry) for entry in own], stages.group)
    zcomm.close_on_failure(stages.group)
    if stages.rank:
        return own, _abort_on_error(_send(values, stages, device)) if sends else values
    if not sends:
        return own, values
    by_stage = [[_from_row(*row) for row in stage] for stage in rows]
    entries_of_all = [entry for stage in by_stage for entry in stage]
    return entries_of_all, _abort_on_error(_receive(values, by_stage, stages, device))


def merge_over_stages(stages: ModelParallelGroup, own: dict[str, str]) -> dict[str, str]:
    """Return the union of the stages' dicts on every rank.  A collective of the pipeline."""
    everywhere = [own] if stages.size == 1 else zcomm.all_gather_object(own, stages.group)
    return {name: value for each in everywhere for name, value in each.items()}


def _abort_on_error(values: Iterator[Tensor]) -> Iterator[Tensor]:
    """Yield the values; an error aborts the world, so that no rank waits for the remaining ones."""
    try:
        yield from values
    except Exception as error:
        zcomm.abort(f"rank {dist.get_rank()} failed in an export of all stages: {type(error).__name__}: {error}")
        raise


def _send(values: Iterator[Tensor], stages: ModelParallelGroup, device: torch.device) -> Iterator[Tensor]:
    for value in values:
        if value.numel():
            data = value.detach().to(device).contiguous().reshape(-1).view(torch.uint8)
            dist.send(data, group=stages.group, group_dst=0)
        yield value


def _receive(
    own: Iterator[Tensor], by_stage: Sequence[Sequence[Entry]], stages: ModelParallelGroup, device: torch.device
) -> Iterator[Tensor]:
    yield from own
    for source, entries in enumerate(by_stage[1:], start=1):
        for entry in entries:
            value = torch.empty(entry.shape, dtype=entry.dtype, device=device)
            if value.numel():
                dist.recv(value.view(-1).view(torch.uint8), group=stages.group, group_src=source)
            yield value


def _to_row(entry: Entry) -> list[object]:
    return [list(entry.names), list(entry.shape), str(entry.dtype).removeprefix("torch.")]


def _from_row(names: list[str], shape: list[int], dtype: str) -> Entry:
    return Entry(tuple(names), tuple(shape), getattr(torch, dtype))
