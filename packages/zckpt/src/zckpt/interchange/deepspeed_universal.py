"""DeepSpeed's universal checkpoints: each parameter in a folder, whole, whatever wrote it.

    zero/<parameter>/{fp32,exp_avg,exp_avg_sq}.pt     {"param": tensor}; from stage 3 the flat tensor itself
    zero/<parameter>/step.pt                          a number (not from stage 3)
    zero/optimizer_state.pt                           loss scale and parameter groups

DeepSpeed's tool also writes an fp32.pt for frozen parameters and buffers, cast to float32; those come from the model
states, which have them exactly (a pipeline's have none).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from zckpt.errors import CheckpointCorrupt
from zckpt.interchange.deepspeed_files import DeepSpeedFiles, TensorParallelRank
from zckpt.interchange.deepspeed_tensors import (
    MASTER,
    STEP,
    StatePart,
    aliases,
    as_tensor,
    frozen_parts,
    module_parts,
    tensors_of,
)

FP32, PARAM = "fp32", "param"


def universal_parts(files: DeepSpeedFiles) -> list[StatePart]:
    """Everything of a universal checkpoint, under DeepSpeed's names."""
    assert files.universal is not None
    rank = files.tp_ranks[0]
    module = {} if rank.model["module"] is None else tensors_of(rank.model)
    frozen = rank.model.get("frozen_param_shapes") or {}
    shapes = _shapes(files.tp_ranks)
    step = _common_step(files.universal.optimizer)
    if missing := sorted(set(shapes) - set(files.universal.params)):
        raise CheckpointCorrupt(
            f"{files.folder}/zero/{missing[0]} is missing: the model states list {len(shapes)} parameters, and "
            f"{len(missing)} of them have no folder",
            path=str(files.folder),
        )
    found: list[StatePart] = []
    for name, states in files.universal.params.items():
        if FP32 not in states:
            raise CheckpointCorrupt(f"{files.folder}/zero/{name} has no {FP32}.pt", path=str(files.folder))
        if set(states) == {FP32} and (name in module or name in frozen):
            continue
        found += _parameter(name, states, shapes.get(name), step if set(states) > {FP32} else None)
    masters = {part.name for part in found}
    if rank.model.get("frozen_param_fragments"):
        return found + list(frozen_parts(rank))
    return found + list(module_parts(rank, aliases(rank), masters)) if module else found


def _shapes(ranks: tuple[TensorParallelRank, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters; of one that tensor-parallel ranks share, not the whole shape."""
    return {
        name: shape
        for rank in ranks
        if rank.model.get("param_shapes") is not None
        for group in rank.groups()
        for name, shape in group.items()
    }


def _common_step(optimizer: Mapping[str, Any]) -> Any:
    """The optimizer's step count, which stage 3 does not write for each parameter; None if there is none."""
    inner = optimizer.get("optimizer_state_dict")
    states = inner.get("state") if isinstance(inner, dict) else None
    if isinstance(states, dict):
        for state in states.values():
            if isinstance(state, dict) and STEP in state:
                return state[STEP]
    groups = optimizer.get("param_groups")
    first = groups[0] if isinstance(groups, list) and groups and isinstance(groups[0], dict) else {}
    return first.get(STEP)


def _parameter(name: str, states: Mapping[str, Any], shape: tuple[int, ...] | None, step: Any) -> Iterator[StatePart]:
    master = _tensor(name, FP32, states[FP32])
    if master.dim() != 1 or shape is None or math.prod(shape) != master.numel():
        shape = tuple(master.shape)
    for key, content in {STEP: step, **states}.items():
        if key == STEP:
            if content is not None:
                value = as_tensor(key, content)
                if value.numel() != 1:
                    raise CheckpointCorrupt(f"zero/{name}/{STEP}.pt holds {tuple(value.shape)} numbers, not one")
                yield StatePart(name, STEP, shape, (0, 1), value.reshape(1).float())
            continue
        value = _tensor(name, key, content)
        if value.numel() != master.numel():
            raise CheckpointCorrupt(
                f"zero/{name}/{key}.pt has {value.numel():,} elements, and {FP32}.pt has {master.numel():,}"
            )
        yield StatePart(name, MASTER if key == FP32 else key, shape, (0, value.numel()), value.contiguous().view(-1))


def _tensor(name: str, key: str, content: Any) -> Tensor:
    value = content.get(PARAM) if isinstance(content, dict) else content
    if not isinstance(value, Tensor) or not torch.is_floating_point(value):
        raise CheckpointCorrupt(f"zero/{name}/{key}.pt holds no tensor of floating numbers ({PARAM!r})")
    return value
