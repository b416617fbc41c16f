"""Marked parameters: a model whose own layers hold tensor-parallel slices, as code in Megatron's style writes them.

Such layers set attributes on their parameters, and DeepSpeed reads them to count norms:

- `tensor_model_parallel = True` (in old code `model_parallel = True`): each tensor rank holds a slice;
- `partition_dim`: the dimension that is sliced (a vector needs none);
- `partition_stride`, by default 1: number of fused blocks along that dimension ([gate; up]) that are sliced one by
  one, with the slices of a rank stored one after the other.

Parameters without a mark are copies of whole tensors.  `adopt_marked_split` translates marks into addresses and
states them (`describe_split`); a partition then treats the model as one that `parallelize` has split.  Messages
inside the layers, and random numbers, stay the model's own.

Ranks exchange the shapes of their slices, which may differ in width, and judge everyone's marks: all raise the same
error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn import Parameter

import zcomm
from zpartition.layout.address import Address
from zpartition.layout.model_parallel import ModelParallelGroup, describe_split
from zpartition.tensor.styles import split_along

__all__ = ["Marks", "adopt_marked_split", "plan_marked", "read_marks"]

_MARKS = ("tensor_model_parallel", "model_parallel")
_NAMED = 10  # parameters that an error lists


@attrs.frozen
class Marks:
    """Local shape and marks of one parameter on one rank."""

    shape: tuple[int, ...]
    is_split: bool = False
    dim: int = -1  # that is sliced; -1: not known
    stride: int = 1

    def problem(self) -> str:
        """Return the reason why the slice has no place in a global tensor; "" if it has one."""
        if not self.is_split:
            return ""
        if not self.shape:
            return "is a scalar, and is marked as split: remove its mark"
        if not 0 <= self.dim < len(self.shape):
            return (
                f"is marked as split and has partition_dim={self.dim}: set it to the dimension (0 to "
                f"{len(self.shape) - 1}) that tensor ranks hold slices of"
            )
        if self.stride < 1 or self.shape[self.dim] % self.stride:
            return (
                f"has partition_stride={self.stride}, which must divide the {self.shape[self.dim]} elements of its "
                f"dimension {self.dim}"
            )
        if self.stride > 1 and self.dim > 0:
            return (
                f"has partition_stride={self.stride} along dimension {self.dim}: several blocks are supported along "
                f"dimension 0 only. Make it {self.stride} parameters of stride 1"
            )
        return ""


def read_marks(param: Parameter) -> Marks:
    """Return the marks of a parameter."""
    is_split = any(bool(getattr(param, mark, False)) for mark in _MARKS)
    dim = 0 if param.dim() == 1 else int(getattr(param, "partition_dim", -1))
    stride = int(getattr(param, "partition_stride", 1))
    return Marks(tuple(param.shape), True, dim, stride) if is_split else Marks(tuple(param.shape))


def adopt_marked_split(model: nn.Module, group: ProcessGroup | None, *, accepts_copies: bool = False) -> bool:
    """State the addresses of the marked parameters of `model`, split over `group`; False if none is marked.

    accepts_copies: without a mark state that every rank of `group` holds the whole model, and return True.

    A collective of `group`.

    Raises:
        ValueError: on every rank.  A slice has no place in a global tensor, marks or shapes differ over the ranks, or
            an unmarked parameter has different shapes.
    """
    mp_group = ModelParallelGroup.of(group)
    own = {name: attrs.astuple(read_marks(param)) for name, param in model.named_parameters()}
    everyone = [
        {name: Marks(tuple(shape), is_split, dim, stride) for name, (shape, is_split, dim, stride) in rank.items()}
        for rank in zcomm.all_gather_object(own, group)
    ]
    addresses = plan_marked(everyone, mp_group.rank)
    by_param = {id(param): addresses[name] for name, param in model.named_parameters() if name in addresses}
    for child in model.modules():
        held = {name: by_param[id(p)] for name, p in child.named_parameters(recurse=False) if id(p) in by_param}
        if held:
            describe_split(child, mp_group, held)
    if accepts_copies and not addresses:
        describe_split(model, mp_group, {})
    return bool(addresses) or accepts_copies


def plan_marked(everyone: Sequence[Mapping[str, Marks]], rank: int) -> dict[str, Address]:
    """Return the address of each marked parameter on `rank`; `everyone`: marks by name, of each tensor rank.  Pure.

    Raises ValueError as `adopt_marked_split` does.
    """
    problems = list(_problems(everyone))
    if problems:
        more = f" (and {len(problems) - _NAMED} more)" if len(problems) > _NAMED else ""
        raise ValueError(
            f"the parameters' marks do not describe one model over {len(everyone)} tensor ranks: "
            f"{'; '.join(problems[:_NAMED])}{more}."
        )
    return {
        name: _address([each[name] for each in everyone], rank)
        for name, marks in everyone[rank].items()
        if marks.is_split
    }


def _problems(everyone: Sequence[Mapping[str, Marks]]) -> Iterator[str]:
    first = everyone[0]
    for rank, marks in enumerate(everyone):
        for name in sorted(set(first) ^ set(marks)):
            has, lacks = (0, rank) if name in first else (rank, 0)
            yield f"{name} exists on tensor rank {has}, not on {lacks}"
    for name, own in first.items():
        problem = next((each[name].problem() for each in everyone if name in each and each[name].problem()), "")
        if problem:
            yield f"{name} {problem}"
            continue
        for rank, marks in enumerate(everyone):
            other = marks.get(name, own)
            if _kind(other) != _kind(own):
                yield f"{name} is {_text(own)} on tensor rank 0 and {_text(other)} on {rank}"
                break


def _kind(marks: Marks) -> tuple[object, ...]:
    """Return everything that is equal on all tensor ranks."""
    shape = tuple(-1 if marks.is_split and dim == marks.dim else size for dim, size in enumerate(marks.shape))
    return shape, marks.is_split, marks.dim, marks.stride


def _text(marks: Marks) -> str:
    split = f"split along dimension {marks.dim} (stride {marks.stride})" if marks.is_split else "not marked as split"
    return f"{list(marks.shape)}, {split},"


def _address(everyone: Sequence[Marks], rank: int) -> Address:
    """Return the address of the slice of `rank`, between those of lower and higher ranks in each block."""
    dim, stride, shape = everyone[0].dim, everyone[0].stride, list(everyone[0].shape)
    widths = [marks.shape[dim] // stride for marks in everyone]  # in one block
    block, begin = sum(widths), sum(widths[:rank])
    shape[dim] = stride * block
    return split_along(tuple(shape), dim, max(block, 1), (begin, begin + widths[rank]), (block,) * stride)
