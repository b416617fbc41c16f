"""Tensors of which the files of tensor-parallel ranks hold parts, joined when the model says their shapes.

A part is smaller than the whole in one dim, along which the ranks' parts follow each other.  Projections that are
several in one (queries, keys and values; gate and up) were cut in each of them, so the pieces of one come from all
parts; Megatron's from version 1 on, and those of GPT-NeoX and BLOOM, are cut between heads that hold all three, so
their parts follow each other.  Parts of the whole's shape are copies, and must be equal.

Rejected: plans that say how *our* ranks would cut a model (files of others may be cut elsewhere, and shapes show it).
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine.inference.loading.stored import StoredTensor, Tensors

__all__ = ["PartedTensor", "join_parts"]

_ALL_THREE = re.compile(r"(^|\.)query_key_value\.")
# torch's attention has in_proj_weight; in_proj.weight is that of other layers, as in the blocks of Mamba
_STACKED = re.compile(r"(^|\.)((qkv_proj|c_attn|Wqkv|W_pack)[._]|in_proj_)(weight|bias)$")
_HALVES = re.compile(r"(^|\.)(gate_up_proj|gate_proj_up_proj)(\.|$)")


@final
@attrs.frozen(eq=False)
class PartedTensor:
    """One tensor in several files."""

    name: str  # in the files
    origin: str  # for errors
    files: tuple[str, ...]  # their names, by rank
    parts: tuple[StoredTensor, ...]  # by rank
    has_thirds: bool = False  # queries, keys and values of Megatron's first version follow each other in each part

    def get_shape(self) -> list[int]:
        """Raise ValueError: only a model says how large the whole is."""
        raise ValueError(self._unknown())

    def __getitem__(self, box: Any) -> Tensor:
        raise ValueError(self._unknown())

    def _unknown(self) -> str:
        return (
            f"{self.origin} has {self.name!r} in {len(self.parts)} parts ({', '.join(self.files[:2])}, ...), and the "
            "model has no tensor of that name, whose shape would say how to join them"
        )

    def joined(self, shape: Sequence[int], config: object) -> StoredTensor:
        """Return the tensor of this shape; config: of the model, for numbers of heads.

        Raises ValueError, with the shapes, if the parts do not give it.
        """
        shapes = [tuple(part.get_shape()) for part in self.parts]
        whole = tuple(shape)
        if all(each == whole for each in shapes):
            return _EqualParts(self)
        dims = [dim for dim in range(len(whole)) if _fits(shapes, whole, dim)]
        if len(dims) != 1:
            listed = ", ".join(f"{each} in {file}" for each, file in zip(shapes, self.files))
            raise ValueError(
                f"{self.origin}: the parts of {self.name!r} do not give {whole}, which the model has: {listed}. "
                "Parts must be smaller in one dim, and add up in it, or be copies of the whole; is tp_size right?"
            )
        return self._cat(dims[0], whole, config)

    def _cat(self, dim: int, whole: tuple[int, ...], config: object) -> StoredTensor:
        from zckpt.interchange import Patchwork

        parts = [Patchwork.over(part) for part in self.parts]
        inner = _inner_sizes(self.name, whole[dim], config, has_thirds=self.has_thirds)
        pieces = [part.split(self._own(inner, part.size(dim), whole[dim]), dim) for part in parts]
        ordered: Any = [rank[at] for at in range(len(inner)) for rank in pieces]
        joined: Patchwork = torch.cat(ordered, dim)  # type: ignore[assignment]
        return joined

    def _own(self, inner: Sequence[int], size: int, whole: int) -> list[int]:
        """Return the sizes of the inner projections in a part of `size`."""
        found = [each * size // whole for each in inner]
        if any(each * size % whole for each in inner):
            raise ValueError(
                f"{self.origin}: {self.name!r} has projections of {', '.join(map(str, inner))} in one, of which a "
                f"part of {size} of {whole} has no whole numbers: the list must say another tp_size or version"
            )
        return found


def join_parts(tensors: Tensors, shapes: Mapping[str, Sequence[int]], config: object) -> Tensors:
    """Return tensors with those in parts joined to the shapes that the model has, by names in files or in the model.

    config: of the model.  Raises ValueError for parts that do not fit.
    """
    if not any(isinstance(each, PartedTensor) for each in tensors.values()):
        return tensors
    return {
        name: each.joined(_shape_of(each, shapes), config) if isinstance(each, PartedTensor) else each
        for name, each in tensors.items()
    }


def _shape_of(given: PartedTensor, shapes: Mapping[str, Sequence[int]]) -> Sequence[int]:
    """Return the shape of the model's tensor: of that name, or of one that differs in the prefix of the model."""
    name = given.name
    found = shapes.get(name)
    if found is None:
        ends = {
            tuple(shape) for each, shape in shapes.items() if each.endswith(f".{name}") or name.endswith(f".{each}")
        }
        found = ends.pop() if len(ends) == 1 else None
    return given.get_shape() if found is None else found


def _fits(shapes: Sequence[tuple[int, ...]], whole: tuple[int, ...], dim: int) -> bool:
    """Return whether parts that are cut along `dim` give the whole."""
    rest = [(*each[:dim], *each[dim + 1 :]) for each in shapes]
    is_alike = all(len(each) == len(whole) for each in shapes) and set(rest) == {(*whole[:dim], *whole[dim + 1 :])}
    return is_alike and sum(each[dim] for each in shapes) == whole[dim]


def _inner_sizes(name: str, size: int, config: object, *, has_thirds: bool) -> list[int]:
    """Return the sizes of the projections that a tensor of `size` has one after the other along the cut dim.

    Raises ValueError for queries, keys and values of sizes that the config does not say.
    """
    if _ALL_THREE.search(name):
        return [size // 3] * 3 if has_thirds and size % 3 == 0 else [size]
    if _HALVES.search(name) and size % 2 == 0:
        return [size // 2] * 2
    return _stacked_sizes(name, size, config) if _STACKED.search(name) else [size]


def _stacked_sizes(name: str, size: int, config: object) -> list[int]:
    heads = _number(config, "num_attention_heads", "n_head")
    width = _number(config, "hidden_size", "n_embd")
    if not heads or size == width:  # of the input, along which a last projection is cut
        return [size // 3] * 3 if size % 3 == 0 and size != width else [size]
    head_size = _number(config, "head_dim") or width // heads
    for kv_heads in (_number(config, "num_key_value_heads"), heads):
        if (heads + 2 * kv_heads) * head_size == size:
            return [heads * head_size, kv_heads * head_size, kv_heads * head_size]
    raise ValueError(
        f"{name!r} has queries, keys and values of {size} rows together, and the model's config says {heads} heads "
        f"of {head_size}: which parts belong together is unknown; pass whole weights"
    )


def _number(config: object, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((each for each in found if isinstance(each, int)), 0)


@final
@attrs.frozen(eq=False)
class _EqualParts:
    """A tensor that every rank's file has whole."""

    given: PartedTensor

    def get_shape(self) -> list[int]:
        return list(self.given.parts[0].get_shape())

    def __getitem__(self, box: Any) -> Tensor:
        """Return the values of a box.  Raises ValueError if the files differ there."""
        given, found = self.given, self.given.parts[0][box]
        for file, other in zip(given.files[1:], itertools.islice(given.parts, 1, None)):
            if not torch.equal(found, other[box]):
                raise ValueError(
                    f"{given.origin}: {given.name!r} is whole in each file, and {given.files[0]} and {file} have "
                    "other values: they are of different models or steps"
                )
        return found
