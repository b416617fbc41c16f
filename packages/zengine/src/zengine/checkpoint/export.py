"""Weights out of an engine, whole, at any stage: streamed to a file, or as a state dict on rank 0.

At stage 3 a weight is whole while its unit is gathered and no longer, so the file is written in the order of the
module's tensors, one gather after the other: memory holds a unit and a buffer, rank 0 writes the file, and the other
ranks only take part in the gathers.  No key of the config is needed for that, and nothing is ever left unwritten.

Of a pipeline rank 0 writes all stages, which send it their tensors one at a time (export_stages.py).

`module.state_dict()` works too, and is what holds everything at once.  State-dict hooks of modules (extra state,
names that change) are known to it alone; a streamed export has the parameters and persistent buffers by their names.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import Parameter

import zpartition
from zengine.checkpoint.consensus import GroupPeers, on_every_rank
from zengine.checkpoint.export_stages import from_all_stages, of_all_stages
from zengine.checkpoint.weight_files import Entry, write_weights

if TYPE_CHECKING:
    from zengine.engine.parts import Run

Named = tuple[Tensor, tuple[str, ...]]  # a tensor of the module, and its names


def save_16bit_model(run: Run, save_dir: str, save_filename: str, *, trained_only: bool) -> bool:
    """See `DeepSpeedEngine.save_16bit_model`."""
    run.clock.require_open("save_16bit_model")
    peers = GroupPeers.of(run)
    problem: list[Exception] = []
    entries, values = _streamed(run, trained_only=trained_only)
    write = partial(write_weights, os.path.join(save_dir, save_filename), entries, values)
    gather: Callable[[], object] = partial(deque, values, 0)  # to the end, for the ranks that take part
    for work in (write, gather) if peers.rank == 0 else (gather,):
        try:
            work()
        except Exception as error:  # of any class, here or on all ranks: the others wait for its message
            problem.append(error)

    def report() -> bool:
        if problem:
            raise problem[0]
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
    """Return the weights, in the dtype that they compute in, on rank 0's CPU; None on the others.  All ranks call."""
    run.clock.require_open("_consolidated_16bit_state_dict")
    entries, values = _streamed(run, trained_only=trained_only)
    is_first = GroupPeers.of(run).rank == 0
    state: dict[str, Tensor] = {}
    for entry, value in zip(entries, values, strict=True):  # strict: to the end on every rank
        if is_first:
            state.update(dict.fromkeys(entry.names, value.detach().to("cpu", copy=True)))
    return state if is_first else None


def _parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Every name of every parameter."""
    yield from module.named_parameters(remove_duplicate=False)


def _tensors(run: Run, *, trained_only: bool) -> list[Named]:
    """Parameters and persistent buffers in the order of the modules, each once, with all of its names."""
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
    """Further names of tied weights -> the name that checkpoints have, of all stages.  A collective of a pipeline."""
    own = {alias: names[0] for _, names in _tensors(run, trained_only=False) for alias in names[1:]}
    return of_all_stages(zpartition.pipeline_stages_of(run.module), own)


def _streamed(run: Run, *, trained_only: bool) -> tuple[list[Entry], Iterator[Tensor]]:
    """Return what there is to export, and a value for each, in order: of all stages on rank 0, of its own elsewhere.

    A collective of a pipeline's ranks; going through the values is one where `_gathered` is, and for stages.
    """
    found, joining = _tensors(run, trained_only=trained_only), zpartition.FullTensors.of(run.module)
    entries = [Entry(names, joining.shape(tensor), tensor.dtype) for tensor, names in found]
    stages = zpartition.pipeline_stages_of(run.module)
    sends = stages.size > 1 and dist.get_process_group_ranks(stages.group)[0] == run.parts.groups.table.min().item()
    return from_all_stages(stages, entries, _gathered(found, joining), device=run.device, sends=sends)


def _gathered(found: list[Named], joining: zpartition.FullTensors) -> Iterator[Tensor]:
    """Each tensor whole while it is looked at.  A collective at stage 3, and where layers are split."""
    for tensor, _ in found:
        if isinstance(tensor, Parameter):
            with zpartition.gathered(tensor):
                yield joining(tensor)
        else:
            yield tensor.detach()
