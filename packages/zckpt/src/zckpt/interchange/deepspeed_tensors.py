"""From the files of a DeepSpeed checkpoint to shards: every tensor with its name and global address, none copied.

Masters and states come from the flat buffers (flat.py), buffers and frozen parameters from the model states.  What a
tensor-parallel rank holds is a box of the global tensor; which dim was cut is not in the files, so a rule says it.

Where the files hold a weight twice, as master and as the model's own, the two are compared: a layout that was
understood wrongly shows as a master that does not round to its weight.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from ..errors import CheckpointCorrupt, CheckpointInputError, CheckpointMismatch
from ..regions import Box, Span
from ..shard import Shard
from .deepspeed_files import Cell, flat_tensors, shape_of
from .flat import Fragment, fragments_of_groups, fragments_of_parts, part_spans

MASTER, STEP = "", "step"  # keys of states beside exp_avg, ...: the weight itself, and the count of updates


@attrs.frozen(eq=False)
class Part:
    """Some elements of a tensor as one tensor-parallel rank has it."""

    name: str
    key: str  # MASTER or a state of the optimizer
    shape: tuple[int, ...]
    span: Span
    tensor: Tensor  # 1-D, a view of the file


@final
@attrs.frozen
class CutRules:
    """Which dim of which tensors tensor parallelism has cut: the first pattern that matches a name decides."""

    dims: Mapping[str, int]  # glob pattern -> dim

    def dim_of(self, name: str, shape: tuple[int, ...]) -> int | None:
        """None: every rank has the whole tensor."""
        for pattern, dim in self.dims.items():
            if fnmatch.fnmatchcase(name, pattern):
                if not 0 <= dim < max(1, len(shape)):
                    raise CheckpointInputError(f"tensor_parallel[{pattern!r}] is {dim}; {name!r} has shape {shape}")
                return dim
        return None


def parts_of(cell: Cell) -> list[Part]:
    """Everything that one tensor-parallel rank saved: masters and states, frozen parameters, buffers."""
    moved = list(_moved(cell)) if cell.shards else list(_moved_without_zero(cell))
    masters = {part.name for part in moved if part.key == MASTER}
    rest = list(_frozen_parts(cell)) if cell.stage == 3 else list(_weights(cell, aliases(cell), masters))
    if cell.shards and cell.stage < 3:
        _compare(moved, cell.model["module"])
    return moved + rest


def addressed(cells: Sequence[Sequence[Part]], rules: CutRules) -> Iterator[tuple[str, Shard]]:
    """(state key, shard) of every part, placed in its global tensor; several cells need rules."""
    if len(cells) > 1 and not rules.dims:
        raise CheckpointInputError(
            f"the checkpoint was written by {len(cells)} tensor-parallel ranks, and its files do not say which dim "
            'of which tensor was cut: give tensor_parallel, such as {"*.query_key_value.*": 0, "*.dense.weight": 1}'
        )
    shapes = [{part.name: part.shape for part in parts} for parts in cells]
    first: dict[tuple[str, str], list[Part]] = {}
    for part in cells[0] if len(cells) > 1 else ():
        first.setdefault((part.name, part.key), []).append(part)
    for number, parts in enumerate(cells):
        for part in parts:
            dim = rules.dim_of(part.name, part.shape) if len(cells) > 1 else None
            if dim is None and number:
                _compare_replicas(part, first.get((part.name, part.key), []))
                continue
            shape, box = _place(part.name, dim, number, shapes)
            if part.key == STEP:
                if number == 0:
                    yield part.key, Shard(part.name, (), (), (0, 1), part.tensor)
            else:
                yield part.key, Shard(part.name, shape, box, part.span, part.tensor)


def _place(name: str, dim: int | None, cell: int, shapes: Sequence[Mapping[str, tuple[int, ...]]]) -> tuple[Any, Box]:
    """The global shape, and the box of one cell."""
    mine = shapes[cell][name]
    if dim is None:
        return mine, tuple((0, size) for size in mine)
    if any(name not in each for each in shapes):
        raise CheckpointMismatch(f"{name!r} is cut by a rule of tensor_parallel, and not every rank has a part of it")
    lengths = [each[name][dim] for each in shapes]
    if any(each[name][:dim] + each[name][dim + 1 :] != mine[:dim] + mine[dim + 1 :] for each in shapes):
        raise CheckpointMismatch(f"the parts of {name!r} have shapes that do not join at dim {dim}")
    lo = sum(lengths[:cell])
    shape = (*mine[:dim], sum(lengths), *mine[dim + 1 :])
    return shape, tuple((lo, lo + mine[dim]) if d == dim else (0, size) for d, size in enumerate(shape))


def _compare_replicas(part: Part, first: Sequence[Part]) -> None:
    """A tensor without a rule is the same on every rank, wherever its flat buffers were cut."""
    compared = 0
    for other in first:
        lo, hi = max(part.span[0], other.span[0]), min(part.span[1], other.span[1])
        if lo >= hi or other.shape != part.shape:
            continue
        mine, theirs = (each.tensor[lo - each.span[0] : hi - each.span[0]] for each in (part, other))
        if not torch.equal(mine, theirs):
            raise CheckpointMismatch(
                f"{part.name!r} {part.key or 'weight'} differs between tensor-parallel ranks, and no rule of "
                "tensor_parallel says how it was cut"
            )
        compared += hi - lo
    if compared != part.tensor.numel():
        raise CheckpointMismatch(f"{part.name!r} has no counterpart on tensor-parallel rank 0: give a rule for it")


# -- what the optimizer moves --------------------------------------------------------------------


def _moved(cell: Cell) -> Iterator[Part]:
    """Masters and states out of the flat buffers of every data-parallel rank."""
    masters = [flat_tensors(shard.get(_MASTERS[cell.stage]), _MASTERS[cell.stage]) for shard in cell.shards]
    states = [_states(shard.get(_STATES[cell.stage]), len(masters[0])) for shard in cell.shards]
    lengths = [[each.numel() for each in mine] for mine in masters]
    if cell.stage == 3:
        fragments = fragments_of_parts(cell.groups(), lengths)
    else:
        if any(len(mine) != len(cell.groups()) for mine in lengths):
            raise CheckpointCorrupt(f"{len(cell.groups())} groups of parameters, and {lengths} elements in buffers")
        fragments = fragments_of_groups(cell.groups(), lengths, cell.shards[0].get("param_alignment_paddings") or [])
    seen: set[str] = set()
    for each in fragments:
        yield _cut(each, MASTER, masters[each.rank][each.group])
        for key, value in states[each.rank][each.group].items():
            if value.numel() != 1 or value.dim():
                yield _cut(each, key, value.reshape(-1))
            elif (label := f"{key}.{each.name}") not in seen:
                seen.add(label)
                yield Part(each.name, key, each.shape, (0, 1), value.reshape(1).float())


_MASTERS = {1: "single_partition_of_fp32_groups", 2: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}
_STATES = {1: "base_optimizer_state", 2: "base_optimizer_state", 3: "optimizer_state_dict"}


def _cut(fragment: Fragment, key: str, buffer: Tensor) -> Part:
    numel = fragment.span[1] - fragment.span[0]
    if fragment.start + numel > buffer.numel():
        raise CheckpointCorrupt(f"{key!r} of {fragment.name!r} ends behind its buffer of {buffer.numel():,} elements")
    part = buffer[fragment.start : fragment.start + numel]
    return Part(fragment.name, key, fragment.shape, fragment.span, part)


def _states(told: Any, count: int) -> list[dict[str, Tensor]]:
    """For each flat buffer, what the optimizer keeps of it; counts become tensors."""
    state = told.get("state") if isinstance(told, dict) else None
    if not isinstance(state, dict):
        raise CheckpointCorrupt(
            "its optimizer's state is not a dict of one state for each group: it was saved with elastic_checkpoint, "
            "or by a release that is not known here"
        )
    if state and set(state) != set(range(count)):
        raise CheckpointCorrupt(f"its optimizer has states {sorted(map(str, state))[:8]} for {count} buffers")
    groups = told.get("param_groups") or [{}]
    made = []
    for index in range(count):
        mine = {str(key): _as_tensor(key, value) for key, value in state.get(index, {}).items() if value is not None}
        if (
            mine and STEP not in mine and isinstance(groups[0].get(STEP), (int, float))
        ):  # fused kernels count by group
            mine[STEP] = torch.tensor(float(groups[0][STEP]))
        made.append(mine)
    return made


def _as_tensor(key: Any, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (int, float)):
        return torch.tensor(float(value))
    raise CheckpointCorrupt(f"the optimizer's state {str(key)[:80]!r} is a {type(value).__name__}, and no tensor")


def _moved_without_zero(cell: Cell) -> Iterator[Part]:
    """Stage 0: the states of torch's own optimizer, by number; the weights are the model's."""
    told = cell.model.get("optimizer")
    if not isinstance(told, dict) or not isinstance(told.get("state"), dict):
        return
    module, names = _tensors_of(cell.model), aliases(cell)
    candidates = {name: tuple(t.shape) for name, t in module.items() if name not in names}
    for name in _buffer_names(cell):
        candidates.pop(name, None)
    states = {index: {str(k): _as_tensor(k, v) for k, v in mine.items()} for index, mine in told["state"].items()}
    for group in told.get("param_groups") or ():
        shapes = [_state_shape(states.get(index, {})) for index in group["params"]]
        for index, name in zip(group["params"], _subsequence(shapes, candidates)):
            shape = candidates[name]
            for key, value in states.get(index, {}).items():
                whole = (0, value.numel())
                yield Part(name, key, shape, whole, value.reshape(-1).float() if key == STEP else value.reshape(-1))


def _state_shape(state: Mapping[str, Tensor]) -> tuple[int, ...]:
    shapes = [tuple(value.shape) for key, value in state.items() if key != STEP]
    return shapes[0] if shapes else ()


def _subsequence(shapes: Sequence[tuple[int, ...]], candidates: Mapping[str, tuple[int, ...]]) -> list[str]:
    """The names, in the model's order, that have these shapes; an error unless there is exactly one way."""
    names = list(candidates)
    ways = [1] + [0] * len(shapes)  # ways[k]: of matching the first k shapes so far
    for name in names:
        for k in range(len(shapes), 0, -1):
            ways[k] += ways[k - 1] * (shapes[k - 1] == candidates[name])
    if ways[-1] != 1:
        raise CheckpointInputError(
            "stage 0 saves the optimizer's state by number, and which parameter has which number cannot be told from "
            f"the shapes ({ways[-1]} ways to match). Save it at ZeRO stage 1, or import the weights alone "
            "(import_weights)"
        )
    found, k = [], 0
    for name in names:
        if k < len(shapes) and candidates[name] == shapes[k]:
            found.append(name)
            k += 1
    return found


# -- what the optimizer does not move ------------------------------------------------------------


def _tensors_of(model: Mapping[str, Any]) -> dict[str, Tensor]:
    module = model["module"]
    if not isinstance(module, dict):
        raise CheckpointCorrupt("its model states have no dict of the module's tensors")
    return {str(name): value for name, value in module.items() if isinstance(value, Tensor)}


def _buffer_names(cell: Cell) -> list[str]:
    return [str(name) for name in cell.model.get("buffer_names") or ()]


def aliases(cell: Cell) -> dict[str, str]:
    """Further names of tied weights -> their first."""
    told = cell.model.get("shared_params")
    if isinstance(told, dict):
        return {str(name): str(first) for name, first in told.items()}
    seen: dict[tuple[Any, ...], str] = {}
    found = {
        name: seen.setdefault((each.data_ptr(), each.shape, each.stride(), each.dtype), name)
        for name, each in _tensors_of(cell.model).items()
        if each.numel()
    }
    return {name: first for name, first in found.items() if name != first}


def _weights(cell: Cell, tied: Container[str], masters: set[str]) -> Iterator[Part]:
    """Whole tensors of the model that no optimizer shard has."""
    for name, value in _tensors_of(cell.model).items():
        if name not in tied and name not in masters:
            yield _whole(name, value)


def _whole(name: str, value: Tensor) -> Part:
    return Part(name, MASTER, tuple(value.shape), (0, value.numel()), value.contiguous().view(-1))


def _frozen_parts(cell: Cell) -> Iterator[Part]:
    """Stage 3: buffers are whole, frozen parameters are cut as the others are."""
    tensors = _tensors_of(cell.model)
    yield from (_whole(name, tensors[name]) for name in _buffer_names(cell) if name in tensors)
    for name, told in (cell.model.get("frozen_param_shapes") or {}).items():
        shape = shape_of(told, name)
        spans = part_spans(math.prod(shape), len(cell.models))
        for model, span in zip(cell.models, spans):
            fragment = (model.get("frozen_param_fragments") or {}).get(name)
            if not isinstance(fragment, Tensor) or fragment.numel() < span[1] - span[0]:
                raise CheckpointCorrupt(f"the frozen parameter {name!r} of shape {shape} is not whole")
            if span[0] < span[1]:
                yield Part(str(name), MASTER, shape, span, fragment.reshape(-1)[: span[1] - span[0]])


def _compare(moved: Sequence[Part], module: Mapping[str, Tensor]) -> None:
    """Every master rounds to the weight that the model had."""
    for part in moved:
        weight = module.get(part.name)
        if part.key != MASTER or not isinstance(weight, Tensor):
            continue
        if tuple(weight.shape) != part.shape:
            raise CheckpointCorrupt(f"{part.name!r} has shape {part.shape} and weights of {tuple(weight.shape)}")
        mine = weight.reshape(-1)[part.span[0] : part.span[1]]
        if not torch.equal(part.tensor.to(mine.dtype).nan_to_num(), mine.nan_to_num()):
            raise CheckpointMismatch(
                f"the masters of {part.name!r} do not round to its weights: the files are of different saves, or lie "
                "in an order that is not known here"
            )
