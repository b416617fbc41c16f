"""Loading weights from files straight into shards: each rank reads its boxes, a few rows at a time.

    with safetensors.safe_open("model.safetensors", "pt") as file:
        zpartition.load_slices(partition, {name: file.get_slice(name) for name in file.keys()})

A source is a tensor, or any object with `get_shape()` that returns boxes for `[start:stop, start:stop]`.  Neither a
full large tensor nor another rank's part of it is ever in memory.  `load_own_slices` does the same for a module
without a partition (for inference, say), whole or split over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import zcomm
from zpartition.layout.address import Address, Shard, cut
from zpartition.layout.model_parallel import addresses_of, pipeline_stages_of
from zpartition.partition import Partition

__all__ = ["Slices", "check_slices", "load_own_slices", "load_slices"]

_CHUNK_NUMEL = 1 << 24  # elements read at once
_NAMED = 10  # names that an error lists


class Slices(Protocol):
    """A tensor in a file."""

    def get_shape(self) -> list[int]: ...
    def __getitem__(self, box: tuple[slice, ...]) -> Tensor: ...


def load_slices(
    partition: Partition,
    tensors: Mapping[str, Slices | Tensor],
    *,
    strict: bool = True,
    fill_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> None:
    """Fill the weights, masters, frozen parameters and persistent buffers of `partition`, cast to their dtypes.

    Every rank must call.

    tensors: by the module's own names; for a pipeline stage, of the whole model.
    strict: `tensors` must have exactly the module's names; otherwise missing ones stay unchanged, others are ignored.
    fill_context: entered before the first tensor is filled and left after the last one, for a vote of the ranks on
        whether all reads succeeded: the weights are gathered afterwards.

    Raises:
        ValueError: tensors are missing, unexpected or of another shape; on every rank, with nothing loaded.
    """
    stages, own = pipeline_stages_of(partition.module), set(_names(partition))
    known = own.union(*zcomm.all_gather_object(sorted(own), stages.group)) if stages.size > 1 else own
    found = _problems(partition.names() if strict else None, partition.shapes(), tensors, known)
    problems = list(found)
    if stages.size > 1:
        problems = list(
            dict.fromkeys(problem for found in zcomm.all_gather_object(problems, stages.group) for problem in found)
        )
    _raise_problems(problems)
    with fill_context(), torch.no_grad():
        for shard in partition.shards_to_fill():
            if shard.name in tensors:
                _read(shard, tensors[shard.name])
    partition.publish()


def load_own_slices(module: nn.Module, tensors: Mapping[str, Slices | Tensor]) -> None:
    """Fill this rank's part of a module without a partition, whole or split (by `parallelize`, `distribute`).

    tensors: full, by the module's own names; a tied one under any of its names.  The module is on real devices.
    Not a collective.  Raises ValueError, with nothing loaded, as `check_slices` does.
    """
    check_slices(module, tensors)
    with torch.no_grad():
        for names, tensor, address in _tensors(module):
            source = next(tensors[name] for name in names if name in tensors)
            values = tensor.detach().contiguous()  # almost always `tensor` itself
            for shard in cut(Shard, names[0], address, (0, values.numel()), values.view(-1).__getitem__):
                _read(shard, source)
            if not tensor.is_contiguous():
                tensor.copy_(values)


def check_slices(module: nn.Module, tensors: Mapping[str, Slices | Tensor]) -> None:
    """Raise ValueError that names tensors that are missing, unexpected or of another shape."""
    held = list(_tensors(module))
    names = [next((name for name in names if name in tensors), names[0]) for names, *_ in held]
    shapes = {name: address.global_shape for names, _, address in held for name in names}
    _raise_problems(list(_problems(names, shapes, tensors, set(shapes))))


def _tensors(module: nn.Module) -> Iterator[tuple[list[str], Tensor, Address]]:
    """Yield parameters and persistent buffers: all names of each, this rank's part, and its address."""
    addresses = addresses_of(module)
    found: dict[int, tuple[list[str], Tensor, Address]] = {}
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(param), ([], param, addresses.get(name) or Address.whole(param.shape)))[0].append(name)
    for name, tensor in module.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in found:
            found[id(tensor)] = ([name], tensor, Address.whole(tensor.shape))
    yield from found.values()


def _read(shard: Shard, source: Slices | Tensor) -> None:
    """Read the boxes that the shard's span covers, one by one."""
    lo, hi = shard.span
    corner, sizes = [start for start, _ in shard.box], [stop - start for start, stop in shard.box]
    for at, sides in _boxes(sizes, lo, hi):
        box = tuple(slice(first + start, first + stop) for first, (start, stop) in zip(corner, sides))
        found: Any = source[box or ...]  # type: ignore[index]
        part = found.reshape(-1)
        shard.tensor[at - lo : at - lo + part.numel()].copy_(part)


def _boxes(sizes: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Yield (number of the first element, sides) of the boxes that cover elements `lo` to `hi` of a flattened tensor.

    Boxes are complete rows of the first dimension if these are not too long, else boxes inside one row.
    """
    if not sizes:
        yield lo, []
        return
    row, rest = math.prod(sizes[1:]), [(0, size) for size in sizes[1:]]
    while lo < hi:
        at, inside = divmod(lo, row)
        if row > 1 and (inside or hi - lo < row or row > _CHUNK_NUMEL):
            end = min(row, inside + hi - lo)
            for first, sides in _boxes(sizes[1:], inside, end):
                yield at * row + first, [(at, at + 1), *sides]
            lo = at * row + end
        else:
            rows = min(hi - lo, max(row, _CHUNK_NUMEL)) // row
            yield lo, [(at, at + rows), *rest]
            lo += rows * row


def _shape(source: Slices | Tensor) -> tuple[int, ...]:
    return tuple(source.shape if isinstance(source, Tensor) else source.get_shape())


def _names(partition: Partition) -> Iterator[str]:
    """Yield all names of the tensors; tied ones have several."""
    yield from partition.names()
    yield from (name for name, _ in partition.module.named_parameters(remove_duplicate=False))


def _problems(
    wanted: Sequence[str] | None,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, Slices | Tensor],
    known: Set[str],
) -> Iterator[str]:
    """Yield what does not fit.  wanted: required names, and only `known` ones are allowed; None: any are allowed."""
    if wanted is not None:
        yield from _listed("missing", sorted(set(wanted) - set(tensors)))
        yield from _listed("unexpected", sorted(set(tensors) - known))
    wrong = (
        f"{name} has shape {_shape(tensors[name])}, the module's {shape}"
        for name, shape in sorted(shapes.items())
        if name in tensors and _shape(tensors[name]) != shape
    )
    yield from _listed("of another shape", list(wrong))


def _raise_problems(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError(f"the tensors do not fit the module, and nothing was loaded: {'; '.join(problems)}.")


def _listed(what: str, items: list[str]) -> Iterator[str]:
    if items:
        more = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
        yield f"{what}: {', '.join(items[:_NAMED])}{more}"
