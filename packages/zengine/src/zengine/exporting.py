"""Weights out of an engine, whole, at any stage: streamed to a file, or as a state dict on rank 0.

At stage 3 a weight is whole while its unit is gathered and no longer, so the file is written in the order of the
module's tensors, one gather after the other: memory holds a unit and a buffer, rank 0 writes the file, and the other
ranks only take part in the gathers.  No key of the config is needed for that, and nothing is ever left unwritten.

Of a pipeline rank 0 writes all stages, which send it their tensors one at a time (stage_exports.py).

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
from zengine.consensus import GroupPeers, on_every_rank
from zengine.stage_exports import from_all_stages, of_all_stages
from zengine.weightfiles import Entry, write_weights

if TYPE_CHECKING:
    from zengine.clock import Clock
    from zengine.config import Plan
    from zengine.engine import Engine
    from zengine.parts import Parts

Named = tuple[Tensor, tuple[str, ...]]  # a tensor of the module, and its names


class EngineExports:
    """What users and integrations call to get weights out; mixed into `Engine`."""

    if TYPE_CHECKING:
        module: nn.Module
        parts: Parts
        plan: Plan
        clock: Clock

    def save_16bit_model(
        self, save_dir: str, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights, in the dtype that they compute in, to one file; True on every rank, which all call.

        save_filename: what ends in .safetensors is written as such, anything else as torch.load reads it.

        Raises ValueError on every rank when rank 0 cannot write.
        """
        self.clock.require_open("save_16bit_model")
        peers = GroupPeers.of(_engine(self))
        problem: list[Exception] = []
        entries, values = _streamed(_engine(self), trained_only=exclude_frozen_parameters)
        write = partial(write_weights, os.path.join(save_dir, save_filename), entries, values)
        gather: Callable[[], object] = partial(deque, values, 0)  # to the end, for the ranks that take part
        for work in (write, gather) if peers.rank == 0 else (gather,):
            try:
                work()
            except Exception as error:  # whatever it is, here or on all ranks: the others wait for word of it
                problem.append(error)

        def told() -> bool:
            if problem:
                raise problem[0]
            return True

        return on_every_rank(told, peers, "no weights were written")

    save_fp16_model = save_16bit_model  # an old name

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """The module's state dict, whole, on every rank; all ranks call."""
        state: dict[str, Any] = _engine(self).state_dict()
        frozen = {name for name, param in _parameters(self.module) if not param.requires_grad}
        return {name: each for name, each in state.items() if not exclude_frozen_parameters or name not in frozen}

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Copy weights into the module and the masters; all ranks call, and rank 0's values count.

        checkpoint: a state dict, or DeepSpeed's dict with one under "module".
        custom_load_fn: `f(src=state_dict, dst=module)` carries the copy out instead, with the weights whole.
        """
        inner = checkpoint.get("module")
        state = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is None:
            _engine(self).load_state_dict(state, strict=strict)
            return
        with zpartition.gathered(self.module, modifier_rank=0), torch.no_grad():
            custom_load_fn(src=state, dst=self.module)

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Tensor] | None:
        """The weights, in the dtype that they compute in, on rank 0's CPU; None on the others.  All ranks call."""
        _engine(self).clock.require_open("_consolidated_16bit_state_dict")
        entries, values = _streamed(_engine(self), trained_only=exclude_frozen_parameters)
        is_first = GroupPeers.of(_engine(self)).rank == 0
        state: dict[str, Tensor] = {}
        for entry, value in zip(entries, values, strict=True):  # strict: to the end on every rank
            if is_first:
                state.update(dict.fromkeys(entry.names, value.detach().to("cpu", copy=True)))
        return state if is_first else None

    _zero3_consolidated_16bit_state_dict = _consolidated_16bit_state_dict

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether a save may hold whole weights: always, the config need not ask for it."""
        return True

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are split over the ranks."""
        return self.plan.zero.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are."""
        return self.plan.zero.stage >= 3


def _engine(exports: EngineExports) -> Engine:
    """The engine that the mixin is part of."""
    engine: Any = exports
    return engine  # type: ignore[no-any-return]


def _parameters(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    """Every name of every parameter."""
    yield from module.named_parameters(remove_duplicate=False)


def _tensors(engine: Engine, *, trained_only: bool) -> list[Named]:
    """Parameters and persistent buffers in the order of the modules, each once, with all of its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}

    def note(name: str, tensor: Tensor) -> None:
        tensors.setdefault(id(tensor), tensor)
        names.setdefault(id(tensor), []).append(name)

    saved = frozenset(engine.parts.partition.names())
    for path, child in engine.module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, param in child.named_parameters(recurse=False, remove_duplicate=False):
            if param.requires_grad or not trained_only:
                note(prefix + name, param)
        for name, buffer in child.named_buffers(recurse=False, remove_duplicate=False):
            if prefix + name in saved or id(buffer) in tensors:
                note(prefix + name, buffer)
    return [(tensor, tuple(names[key])) for key, tensor in tensors.items()]


def tied_names(engine: Engine) -> dict[str, str]:
    """Further names of tied weights -> the name that checkpoints have, of all stages.  A collective of a pipeline."""
    own = {alias: names[0] for _, names in _tensors(engine, trained_only=False) for alias in names[1:]}
    return of_all_stages(zpartition.stages_of(engine.module), own)


def _streamed(engine: Engine, *, trained_only: bool) -> tuple[list[Entry], Iterator[Tensor]]:
    """What there is to export, and a value for each, in order: of all stages on rank 0, of its own elsewhere.

    A collective of a pipeline's ranks; going through the values is one where `_gathered` is, and for stages.
    """
    found, joining = _tensors(engine, trained_only=trained_only), zpartition.Joining.of(engine.module)
    entries = [Entry(names, joining.shape(tensor), tensor.dtype) for tensor, names in found]
    stages = zpartition.stages_of(engine.module)
    sends = (
        stages.size > 1 and dist.get_process_group_ranks(stages.group)[0] == engine.parts.groups.table.min().item()
    )
    return from_all_stages(stages, entries, _gathered(found, joining), device=engine.device, sends=sends)


def _gathered(found: list[Named], joining: zpartition.Joining) -> Iterator[Tensor]:
    """Each tensor whole while it is looked at.  A collective at stage 3, and where layers are split."""
    for tensor, _ in found:
        if isinstance(tensor, Parameter):
            with zpartition.gathered(tensor):
                yield joining(tensor)
        else:
            yield tensor.detach()
