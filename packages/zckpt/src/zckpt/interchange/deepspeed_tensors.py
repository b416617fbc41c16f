"""Tensors of a DeepSpeed checkpoint as shards with names and global addresses, without a copy.

Masters and optimizer states come from the flat buffers (deepspeed_flat.py), buffers and frozen parameters from the
model states.  A tensor-parallel rank holds a box of the global tensor; the files do not record the sharded dim, so
the caller passes rules.

If the files hold a weight twice, as fp32 master and in the model, the two are compared: a misread layout shows as a
master that does not round to its weight.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointCorrupt, CheckpointInputError, CheckpointMismatch
from zckpt.format.regions import Box, Span
from zckpt.format.shard import Shard
from zckpt.interchange.deepspeed_files import TensorParallelRank, flat_tensors, shape_of
from zckpt.interchange.deepspeed_flat import Fragment, fragments_of_groups, fragments_of_parts, part_spans

MASTER, STEP = "", "step"  # state keys: the weight itself, and the number of updates


@attrs.frozen(eq=False)
class StatePart:
    """Elements of a tensor of one tensor-parallel rank."""

    name: str
    key: str  # MASTER or a state of the optimizer
    shape: tuple[int, ...]
    span: Span
    tensor: Tensor  # 1-D, a view of the file


@final
@attrs.frozen
class ShardingRules:
    """Dims that tensor parallelism shards; the first pattern that matches a name applies."""

    dims: Mapping[str, int]  # glob pattern -> dim
    tied_layers: Mapping[str, int] = MappingProxyType({})  # of a pipeline at stage 0: key -> first layer

    def dim_of(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The sharded dim of a tensor; None if every rank has it whole."""
        for pattern, dim in self.dims.items():
            if fnmatch.fnmatchcase(name, pattern):
                if not 0 <= dim < max(1, len(shape)):
                    raise CheckpointInputError(f"tensor_parallel[{pattern!r}] is {dim}; {name!r} has shape {shape}")
                return dim
        return None


def state_parts(tp_rank: TensorParallelRank) -> list[StatePart]:
    """Everything that one tensor-parallel rank saved: masters, states, frozen parameters, buffers."""
    optimized = list(optimizer_parts(tp_rank)) if tp_rank.shards else list(numbered_parts(tp_rank))
    masters = {part.name for part in optimized if part.key == MASTER}
    rest = (
        list(frozen_parts(tp_rank)) if tp_rank.stage == 3 else list(module_parts(tp_rank, aliases(tp_rank), masters))
    )
    if tp_rank.shards and tp_rank.stage < 3:
        check_masters(optimized, tp_rank.model["module"])
    return optimized + rest


def place_shards(tp_ranks: Sequence[Sequence[StatePart]], rules: ShardingRules) -> Iterator[tuple[str, Shard]]:
    """Yield (state key, shard) of every part, placed in its global tensor; several ranks need rules."""
    if len(tp_ranks) > 1 and not rules.dims:
        raise CheckpointInputError(
            f"the checkpoint was written by {len(tp_ranks)} tensor-parallel ranks, and its files do not record "
            "which dim of each tensor is sharded: pass tensor_parallel, "
            'e.g. {"*.query_key_value.*": 0, "*.dense.weight": 1}'
        )
    shapes = [{part.name: part.shape for part in parts} for parts in tp_ranks]
    first: dict[tuple[str, str], list[StatePart]] = {}
    for part in tp_ranks[0] if len(tp_ranks) > 1 else ():
        first.setdefault((part.name, part.key), []).append(part)
    for number, parts in enumerate(tp_ranks):
        for part in parts:
            dim = rules.dim_of(part.name, part.shape) if len(tp_ranks) > 1 else None
            if dim is None and number:
                check_replicas(part, first.get((part.name, part.key), []))
                continue
            shape, box = _global_box(part.name, dim, number, shapes)
            if part.key == STEP:
                if number == 0:
                    yield part.key, Shard(part.name, (), (), (0, 1), part.tensor)
            else:
                yield part.key, Shard(part.name, shape, box, part.span, part.tensor)


def _global_box(
    name: str, dim: int | None, tp_rank: int, shapes: Sequence[Mapping[str, tuple[int, ...]]]
) -> tuple[Any, Box]:
    """The global shape, and the box of one tensor-parallel rank."""
    mine = shapes[tp_rank][name]
    if dim is None:
        return mine, tuple((0, size) for size in mine)
    if any(name not in each for each in shapes):
        raise CheckpointMismatch(f"tensor_parallel shards {name!r}, but not every rank has a part of it")
    lengths = [each[name][dim] for each in shapes]
    if any(each[name][:dim] + each[name][dim + 1 :] != mine[:dim] + mine[dim + 1 :] for each in shapes):
        raise CheckpointMismatch(f"the parts of {name!r} have shapes that cannot be joined along dim {dim}")
    lo = sum(lengths[:tp_rank])
    shape = (*mine[:dim], sum(lengths), *mine[dim + 1 :])
    return shape, tuple((lo, lo + mine[dim]) if d == dim else (0, size) for d, size in enumerate(shape))


def check_replicas(part: StatePart, first: Sequence[StatePart], ranks: str = "tensor-parallel ranks") -> None:
    """Check that a tensor without a rule is equal on every rank, for any split of the flat buffers."""
    is_tensor = ranks.startswith("tensor")
    hint = ", and no rule of tensor_parallel matches it: add one" if is_tensor else ": files of different saves"
    compared = 0
    for other in first:
        lo, hi = max(part.span[0], other.span[0]), min(part.span[1], other.span[1])
        if lo >= hi or other.shape != part.shape:
            continue
        mine, theirs = (each.tensor[lo - each.span[0] : hi - each.span[0]] for each in (part, other))
        if not torch.equal(mine, theirs):
            raise CheckpointMismatch(f"{part.name!r} {part.key or 'weight'} differs between {ranks}{hint}")
        compared += hi - lo
    if compared != part.tensor.numel():
        raise CheckpointMismatch(
            f"{part.name!r} has no counterpart among the {ranks} before"
            f"{': add a rule of tensor_parallel for it' if is_tensor else ''}"
        )


# -- optimized parameters ------------------------------------------------------------------------


def optimizer_parts(tp_rank: TensorParallelRank) -> Iterator[StatePart]:
    """Masters and states from the flat buffers of every data-parallel rank (of `tp_rank.shards`)."""
    masters = [flat_tensors(shard.get(_MASTERS[tp_rank.stage]), _MASTERS[tp_rank.stage]) for shard in tp_rank.shards]
    states = [_buffer_states(shard.get(_STATES[tp_rank.stage]), len(masters[0])) for shard in tp_rank.shards]
    lengths = [[each.numel() for each in mine] for mine in masters]
    if tp_rank.stage == 3:
        fragments = fragments_of_parts(tp_rank.groups(), lengths)
    else:
        if any(len(mine) != len(tp_rank.groups()) for mine in lengths):
            raise CheckpointCorrupt(
                f"{len(tp_rank.groups())} parameter groups do not match buffers of {lengths} elements"
            )
        fragments = fragments_of_groups(
            tp_rank.groups(), lengths, tp_rank.shards[0].get("param_alignment_paddings") or []
        )
    seen: set[str] = set()
    for each in fragments:
        yield _slice_buffer(each, MASTER, masters[each.rank][each.group])
        for key, value in states[each.rank][each.group].items():
            if value.numel() != 1 or value.dim():
                yield _slice_buffer(each, key, value.reshape(-1))
            elif (label := f"{key}.{each.name}") not in seen:
                seen.add(label)
                yield StatePart(each.name, key, each.shape, (0, 1), value.reshape(1).float())


_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_STATES = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


def _slice_buffer(fragment: Fragment, key: str, buffer: Tensor) -> StatePart:
    numel = fragment.span[1] - fragment.span[0]
    if fragment.start + numel > buffer.numel():
        raise CheckpointCorrupt(f"{key!r} of {fragment.name!r} ends beyond its buffer of {buffer.numel():,} elements")
    part = buffer[fragment.start : fragment.start + numel]
    return StatePart(fragment.name, key, fragment.shape, fragment.span, part)


def _buffer_states(saved: Any, count: int) -> list[dict[str, Tensor]]:
    """Optimizer states of each flat buffer; counts become tensors."""
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise CheckpointCorrupt(
            "its optimizer's state is not a dict with one state per group: it was saved with elastic_checkpoint, "
            "which is not supported, or by an unknown release"
        )
    if state and set(state) != set(range(count)):
        raise CheckpointCorrupt(f"its optimizer has states {sorted(map(str, state))[:8]} for {count} buffers")
    groups = saved.get("param_groups") or [{}]
    made = []
    for index in range(count):
        mine = {str(key): as_tensor(key, value) for key, value in state.get(index, {}).items() if value is not None}
        if (
            mine and STEP not in mine and isinstance(groups[0].get(STEP), (int, float))
        ):  # fused kernels count by group
            mine[STEP] = torch.tensor(float(groups[0][STEP]))
        made.append(mine)
    return made


def as_tensor(key: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    raise CheckpointCorrupt(f"the optimizer's state {str(key)[:80]!r} is a {type(value).__name__}, not a tensor")


def numbered_parts(tp_rank: TensorParallelRank) -> Iterator[StatePart]:
    """States at stage 0: of a torch optimizer, by parameter number; the weights are in the model states."""
    saved = tp_rank.model.get("optimizer")
    if not isinstance(saved, dict) or not isinstance(saved.get("state"), dict):
        return
    module, names = tensors_of(tp_rank.model), aliases(tp_rank)
    candidates = {name: tuple(t.shape) for name, t in module.items() if name not in names}
    for name in _buffer_names(tp_rank):
        candidates.pop(name, None)
    for group in saved.get("param_groups") or ():
        yield from states_by_number(saved, group["params"], candidates)


def states_by_number(
    saved: Mapping[str, Any], numbers: Sequence[Any], candidates: Mapping[str, tuple[int, ...]]
) -> Iterator[StatePart]:
    """States of the parameters with these numbers, which are some of the candidates, in order.

    Parameters without a state (never updated, or of SGD without momentum) are passed over.
    """
    states = {index: state_of(saved, index) for index in numbers}
    used = [index for index in numbers if states[index]]
    for index, name in zip(used, match_names([state_shape(states[n]) for n in used], candidates) if used else ()):
        for key, value in states[index].items():
            flat = value.reshape(-1)
            yield StatePart(name, key, candidates[name], (0, value.numel()), flat.float() if key == STEP else flat)


def state_of(saved: Mapping[str, Any], number: Any) -> dict[str, Tensor]:
    """State of a parameter by key; {} if it has none."""
    found = saved["state"].get(number, {}).items()
    return {str(key): as_tensor(key, value) for key, value in found if value is not None}


def state_shape(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    shapes = [tuple(value.shape) for key, value in state.items() if key != STEP]
    return shapes[0] if shapes else ()


def match_names(shapes: Sequence[tuple[int, ...]], candidates: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names, in the model's order, that match these shapes; raises unless there is exactly one match."""
    names = list(candidates)
    ways = [1] + [0] * len(shapes)  # ways[k]: number of ways to match the first k shapes so far
    for name in names:
        for k in range(len(shapes), 0, -1):
            ways[k] += ways[k - 1] * (shapes[k - 1] == candidates[name])
    if ways[-1] != 1:
        raise CheckpointInputError(
            "stage 0 saves the optimizer's state by number, and the shapes do not determine the parameter of each "
            f"number ({ways[-1]} ways to match). Save at ZeRO stage 1, or import only the weights (import_weights)"
        )
    found, k = [], 0
    for name in names:
        if k < len(shapes) and candidates[name] == shapes[k]:
            found.append(name)
            k += 1
    return found


# -- other tensors of the module -----------------------------------------------------------------


def tensors_of(model: Mapping[str, Any]) -> dict[str, Tensor]:
    module = model["module"]
    if not isinstance(module, dict):
        raise CheckpointCorrupt("its model states have no dict of the module's tensors")
    return {str(name): value for name, value in module.items() if isinstance(value, Tensor)}


def _buffer_names(tp_rank: TensorParallelRank) -> list[str]:
    return [str(name) for name in tp_rank.model.get("buffer_names") or ()]


def aliases(tp_rank: TensorParallelRank) -> dict[str, str]:
    """Alias of a tied weight -> its first name."""
    saved = tp_rank.model.get("shared_params")
    if isinstance(saved, dict):
        return {str(name): str(first) for name, first in saved.items()}
    seen: dict[tuple[Any, ...], str] = {}
    found = {
        name: seen.setdefault((each.data_ptr(), each.shape, each.stride(), each.dtype), name)
        for name, each in tensors_of(tp_rank.model).items()
        if each.numel()
    }
    return {name: first for name, first in found.items() if name != first}


def module_parts(tp_rank: TensorParallelRank, tied: Container[str], masters: set[str]) -> Iterator[StatePart]:
    """Whole tensors of the model that are in no optimizer shard."""
    for name, value in tensors_of(tp_rank.model).items():
        if name not in tied and name not in masters:
            yield whole_part(name, value)


def whole_part(name: str, value: Tensor) -> StatePart:
    return StatePart(name, MASTER, tuple(value.shape), (0, value.numel()), value.contiguous().view(-1))


def frozen_parts(tp_rank: TensorParallelRank) -> Iterator[StatePart]:
    """Buffers (whole) and frozen parameters (partitioned like the others) at stage 3."""
    tensors = tensors_of(tp_rank.model)
    yield from (whole_part(name, tensors[name]) for name in _buffer_names(tp_rank) if name in tensors)
    for name, saved in (tp_rank.model.get("frozen_param_shapes") or {}).items():
        shape = shape_of(saved, name)
        spans = part_spans(math.prod(shape), len(tp_rank.models))
        for model, span in zip(tp_rank.models, spans):
            fragment = (model.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(fragment, Tensor) or fragment.numel() < span[1] - span[0]:
                raise CheckpointCorrupt(f"parts of the frozen parameter {name!r} of shape {shape} are missing")
            if span[0] < span[1]:
                yield StatePart(str(name), MASTER, shape, span, fragment.reshape(-1)[: span[1] - span[0]])


def check_masters(optimized: Sequence[StatePart], module: Mapping[str, Tensor]) -> None:
    """Check that every master rounds to its weight in the model states."""
    for part in optimized:
        weight = module.get(part.name)
        if part.key != MASTER or not isinstance(weight, Tensor):
            continue
        if tuple(weight.shape) != part.shape:
            raise CheckpointCorrupt(
                f"the master of {part.name!r} has shape {part.shape}, its weight {tuple(weight.shape)}"
            )
        mine = weight.reshape(-1)[part.span[0] : part.span[1]]
        if not torch.equal(part.tensor.to(mine.dtype).nan_to_num(), mine.nan_to_num()):
            raise CheckpointMismatch(
                f"the masters of {part.name!r} do not round to its weights: the files are of different saves, or of "
                "an unknown layout"
            )
