"""Fragments: the parts of the weights that replica groups exchange one after another (Douillard et al. 2025).

Fragment f of F holds layers f, f + F, f + 2F, ...: strides, so that each exchange touches shallow and deep layers.
A layer is the first number in a parameter's name (`blocks.3.attention.weight`).  Tensors outside of layers, such as
embeddings, and the last layers of a number that F does not divide are cut evenly among the fragments, so every
fragment has 1 / F of the weights.  An outer update is elementwise, so it may cut a tensor anywhere.

A pure function of the layout: replica groups have equal layouts, hence equal fragments on ranks of equal index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import attrs

from zpartition.layout.layout import Piece

__all__ = ["Segment", "plan_fragments"]

_FIRST_NUMBER = re.compile(r"^(.*?)(?:^|\.)(\d+)\.")


@attrs.frozen
class Segment:
    """A run of elements of one fragment, and its place in a master."""

    storage: int  # index of the storage whose master holds it
    start: int  # first element in that master
    piece: Piece  # the parameter's elements; its offset counts in the fragment

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.piece.numel

    @property
    def place(self) -> slice:
        """Elements of the fragment."""
        return slice(self.piece.offset, self.piece.offset + self.piece.numel)


def plan_fragments(
    pieces: Sequence[Sequence[Piece]], names: Sequence[str], num_fragments: int
) -> tuple[tuple[Segment, ...], ...]:
    """Return the segments of each fragment on one rank.

    pieces: the rank's parts of parameters, by storage.
    names: all parameters of the model, in registration order; they number the layers.
    """
    strides = _strides(names, num_fragments)
    found: list[list[Segment]] = [[] for _ in range(num_fragments)]
    ends = [0] * num_fragments
    for storage, own in enumerate(pieces):
        for piece in own:
            for fragment, (start, stop) in _spans(piece, strides.get(piece.slot.name), num_fragments):
                part = Piece(piece.slot, (start, stop), ends[fragment])
                found[fragment].append(Segment(storage, piece.offset + start - piece.span[0], part))
                ends[fragment] += stop - start
    return tuple(map(tuple, found))


def _strides(names: Sequence[str], num_fragments: int) -> dict[str, int]:
    """Return the fragment of each parameter that is not cut."""
    layer_of = {name: match.group(1, 2) for name in names if (match := _FIRST_NUMBER.match(name))}
    numbers = {layer: index for index, layer in enumerate(dict.fromkeys(layer_of.values()))}
    whole = len(numbers) // num_fragments * num_fragments
    return {name: numbers[layer] % num_fragments for name, layer in layer_of.items() if numbers[layer] < whole}


def _spans(piece: Piece, stride: int | None, num_fragments: int) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (fragment, span) of the parts of a piece."""
    if stride is not None:
        yield stride, piece.span
        return
    numel = piece.slot.numel
    for fragment in range(num_fragments):
        low, high = numel * fragment // num_fragments, numel * (fragment + 1) // num_fragments
        start, stop = max(low, piece.span[0]), min(high, piece.span[1])
        if start < stop:
            yield fragment, (start, stop)
