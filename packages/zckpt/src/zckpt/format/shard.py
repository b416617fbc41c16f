"""A tensor with its global address: the unit of saving and loading."""

from __future__ import annotations

import functools
import re
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zckpt.errors import CheckpointInputError
from zckpt.format.regions import Box, Region, Span, region_problem, whole_box
from zckpt.format.safetensors_layout import dtype_name

MAX_NAME = 1024  # characters
_FORBIDDEN = re.compile("[\x00-\x1f\ud800-\udfff]")


class ShardLike(Protocol):
    """Any object with these five attributes."""

    @property
    def name(self) -> str:
        """Name of the global tensor, the same on every rank and at every world size."""
        ...

    @property
    def global_shape(self) -> tuple[int, ...]: ...

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """(lo, hi) per dim: the hyper-rectangle of the global tensor that this model-parallel rank holds."""
        ...

    @property
    def span(self) -> tuple[int, int]:
        """[start, stop) of the flattened box (row-major): the elements that this rank holds."""
        ...

    @property
    def tensor(self) -> Tensor:
        """(stop - start,) contiguous, any dtype of safetensors, any device."""
        ...


@final
@attrs.frozen(eq=False)
class Shard:
    """The plain ShardLike.  Its fields are validated together on construction."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    span: Span
    tensor: Tensor

    def __attrs_post_init__(self) -> None:
        check_shard(self)


def whole(name: str, tensor: Tensor) -> Shard:
    """The shard of a tensor that this rank holds entirely.

    `tensor`: any shape, contiguous; the shard shares its memory, so a load into it fills the tensor.

    Raises CheckpointInputError for a tensor that is not contiguous.

    >>> whole("w", torch.zeros(2, 3))
    Shard(name='w', global_shape=(2, 3), box=((0, 2), (0, 3)), span=(0, 6), tensor=tensor([0., 0., 0., 0., 0., 0.]))
    """
    if not tensor.is_contiguous():
        raise CheckpointInputError(
            f"tensor {name!r} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous: "
            "pass .contiguous() to save it; to load it, load into a contiguous copy and copy that back"
        )
    shape = tuple(tensor.shape)
    return Shard(name, shape, whole_box(shape), (0, tensor.numel()), tensor.detach().view(-1))


@attrs.frozen
class ShardAddress:
    """Position of a shard's elements, as plain tuples of int."""

    shape: tuple[int, ...]  # of the global tensor
    region: Region
    problem: str  # why the region cannot be part of the tensor; "" if it can


def address_of(shard: ShardLike) -> ShardAddress:
    """The address of a shard, a value that shards of one shape share."""
    try:
        return _address(shard.global_shape, shard.box, shard.span)
    except TypeError:  # lists
        return _address.__wrapped__(shard.global_shape, shard.box, shard.span)


def region_of(shard: ShardLike) -> Region:
    """Box and span as plain tuples of int."""
    return address_of(shard).region


def shape_of(shard: ShardLike) -> tuple[int, ...]:
    return address_of(shard).shape


@functools.lru_cache(maxsize=1 << 14)  # models have many tensors and few shapes
def _address(shape: tuple[int, ...], box: tuple[tuple[int, int], ...], span: tuple[int, int]) -> ShardAddress:
    sizes = tuple(int(size) for size in shape)
    region = Region(tuple((int(lo), int(hi)) for lo, hi in box), (int(span[0]), int(span[1])))
    return ShardAddress(sizes, region, region_problem(sizes, region))


def name_problem(name: object) -> str:
    """Error text if this is not a valid tensor name; "" if it is."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        return f"a name must be a str of 1 to {MAX_NAME} characters"
    if name == "__metadata__":
        return "the name __metadata__ is reserved by the safetensors format"
    if _FORBIDDEN.search(name):
        return "a name must not contain control characters or lone surrogates"
    return ""


def check_shard(shard: ShardLike) -> None:
    """Raises CheckpointInputError that names the shard, if its address and its tensor do not match."""
    problem = name_problem(shard.name) or _address_problem(shard) or _tensor_problem(shard.tensor, shard.span)
    if problem:
        raise CheckpointInputError(f"shard {str(shard.name)[:80]!r}: {problem}")
    dtype_name(shard.tensor.dtype)


def check_shard_again(shard: ShardLike) -> None:
    """Raises like check_shard; of a `Shard`, which was checked when it was made, only its tensor may have changed."""
    tensor, (start, stop) = shard.tensor, shard.span
    if type(shard) is not Shard or tensor.dim() != 1 or tensor.numel() != stop - start or not tensor.is_contiguous():
        check_shard(shard)


def _address_problem(shard: ShardLike) -> str:
    try:
        return address_of(shard).problem
    except (TypeError, ValueError, IndexError):
        return (
            "global_shape must be a tuple of int, box a tuple of (lo, hi) and span a (start, stop); given "
            f"{shard.global_shape!r}, {shard.box!r}, {shard.span!r}"
        )


def _tensor_problem(tensor: Tensor, span: Span) -> str:
    numel = span[1] - span[0]
    if not isinstance(tensor, Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        return f"its tensor must be a plain strided torch.Tensor, not {type(tensor).__name__}"
    if tensor.device.type == "meta":
        return "its tensor is on the meta device and has no values"
    if tensor.dim() != 1 or not tensor.is_contiguous() or tensor.numel() != numel:
        return (
            f"its tensor must be 1-D, contiguous and of {numel} elements, the length of span {tuple(span)}; "
            f"given shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        )
    return ""


def describe(dtype: torch.dtype, shape: tuple[int, ...]) -> str:
    """Dtype and shape for errors: "float32 (2, 3)"."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"
