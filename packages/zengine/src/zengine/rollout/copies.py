"""Copies of a decoder's weights for generation: split over tensor ranks, quantized, or both; made unit by unit.

Problem.  At stage 3 a copy that is made under the whole gather needs the memory of the model and that of the copy.

Design.  What a decoder reads (projections, norms, the embedding) is sorted by the units of stage 3 that have its
parameters.  One unit is gathered at a time, its parts are copied, and it is released: beside the copy there is one
unit.  A layer with adapters is merged first, in float32 and rounded once; a part of a split matrix is what a rank
keeps of it; quantized parts are rounded after the cut.  Weights that are whole on every rank have no units, and the
same code copies them.

A second pass repeats the matrices that a format of four bits is too coarse for; quantized.py says which those are.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.quantized import OUTLIER, projections, quantize_weight, replaced
from zengine.inference.quantized_modules import parameters_of, present_projection
from zengine.inference.structure import Block, Decoder, Embedding, Norm, Projection
from zengine.rollout.tensor_split import WHOLE, TensorSplit
from zprecision.quant import Format, Int8

__all__ = ["Units", "copy_decoder", "copy_problem"]


class Units:
    """Parts of the weights that are gathered one at a time: none, where weights are whole on every rank."""

    def of(self, params: Sequence[nn.Parameter]) -> tuple[str, ...]:
        """Return the names of the units that have `params`."""
        return ()

    def all(self) -> tuple[str, ...]:
        """Return the names of all units."""
        return ()

    def release(self) -> None:
        """Release what ended forwards have left gathered."""

    def held(self, names: Sequence[str]) -> AbstractContextManager[None]:
        """Hold the whole weights of these units inside the block; all ranks enter it."""
        return nullcontext()


def copy_problem(decoder: Decoder) -> str:
    """Return why no copy of a decoder can be made; "" if one can."""
    if decoder.opaque:
        return f"{decoder.opaque[0]} is called as it is, with the module's own weights"
    if decoder.embedding.lookup is not None or any(each.ranks is not None for each in projections(decoder)):
        return "its layers are split over tensor-parallel ranks already"
    return ""


def copy_decoder(
    decoder: Decoder, module: nn.Module, units: Units, split: TensorSplit = WHOLE, format: Format | None = None
) -> Decoder:
    """Return a decoder over weights of its own; all ranks call, and gather each unit once.

    decoder: recognized in `module`; its own tensors are not read.
    split: parts of this rank.
    format: of all projections but routers and outliers; None: the dtype of the module.
    """
    copies = _Copies(decoder, module, units, split, format)
    copies.make(copies.items())
    if errors := {key: error for key, error in copies.errors.items() if not isinstance(format, Int8)}:
        limit = OUTLIER * statistics.median(errors.values())
        copies.format = Int8()
        copies.make([item for item in copies.items() if errors.get(item.key, 0.0) > limit])
    return copies.decoded()


@attrs.frozen(eq=False)
class _Item:
    """One part of a decoder."""

    key: int  # identity of the part
    params: tuple[nn.Parameter, ...]  # that the copy reads
    copy: Callable[[], Any]


@final
@attrs.define(eq=False)
class _Copies:
    """Copies of the parts of one decoder."""

    decoder: Decoder
    module: nn.Module
    units: Units
    split: TensorSplit
    format: Format | None
    made: dict[int, Any] = attrs.field(factory=dict)  # by the identity of the part
    errors: dict[int, float] = attrs.field(factory=dict)  # relative ones, of quantized projections

    @torch.no_grad()
    def make(self, items: Sequence[_Item]) -> None:
        """Copy the items, those of the same units together."""
        by_units: dict[tuple[str, ...], list[_Item]] = {}
        for item in items:
            by_units.setdefault(self.units.of(item.params), []).append(item)
        for names, members in by_units.items():
            with self.units.held(names):
                for item in members:
                    self.made[item.key] = item.copy()

    def items(self) -> list[_Item]:
        """Return all parts, the embedding first."""
        embedding, quantized = self.decoder.embedding, set(map(id, projections(self.decoder, routers=False)))
        tables = [embedding.tokens, *([] if embedding.positions is None else [embedding.positions])]
        found = [_Item(id(embedding), _parameters(tables), functools.partial(self._embedding, embedding))]
        for norm in _norms(self.decoder):
            vectors = [each for each in (norm.weight, norm.bias) if each is not None]
            found.append(_Item(id(norm), _parameters(vectors), functools.partial(_norm, norm)))
        for each in projections(self.decoder):
            is_quantized = self.format is not None and id(each) in quantized
            make = functools.partial(self._projection, each, is_quantized)
            found.append(_Item(id(each), parameters_of(each, self.module), make))
        return found

    def _embedding(self, embedding: Embedding) -> Embedding:
        return self.split.embedding(
            attrs.evolve(
                embedding,
                tokens=self.split.tokens(embedding.tokens.detach()),
                positions=None if embedding.positions is None else embedding.positions.detach().clone(),
            )
        )

    def _projection(self, projection: Projection, is_quantized: bool) -> Projection:
        present = present_projection(projection, self.module)
        if not isinstance(present.weight, Tensor):
            raise ValueError(f"{projection.name} is quantized already: no copy of it is made")
        cut = self.split.cut(projection)
        if not is_quantized and projection.weight is self.decoder.embedding.tokens:  # tied
            return cut.with_parts(present, self.made[id(self.decoder.embedding)].tokens)
        weight = cut.weight(present.weight.detach())
        if not is_quantized:
            return cut.with_parts(present, weight)
        assert self.format is not None
        codes, row = quantize_weight(projection.name, weight, self.format)
        self.errors[id(projection)] = row.error
        return cut.with_parts(present, codes)

    def decoded(self) -> Decoder:
        """Return the decoder of the copies."""
        made, split = self.made, self.split
        found = replaced(self.decoder, lambda each: made[id(each)])

        def norm(each: Norm | None) -> Norm | None:
            return None if each is None else made[id(each)]

        def block(each: Block) -> Block:
            attention = attrs.evolve(
                each.attention, query_norm=norm(each.attention.query_norm), key_norm=norm(each.attention.key_norm)
            )
            return attrs.evolve(
                each,
                attention=split.attention(attention),
                attention_norm=norm(each.attention_norm),
                attention_out_norm=norm(each.attention_out_norm),
                mlp_norm=norm(each.mlp_norm),
                mlp_out_norm=norm(each.mlp_out_norm),
            )

        embedding: Embedding = made[id(self.decoder.embedding)]
        return attrs.evolve(
            found,
            embedding=attrs.evolve(embedding, norm=norm(embedding.norm)),
            blocks=tuple(map(block, found.blocks)),
            norm=norm(self.decoder.norm),
        )


def _norms(decoder: Decoder) -> Iterator[Norm]:
    for block in decoder.blocks:
        own = (block.attention_norm, block.attention_out_norm, block.mlp_norm, block.mlp_out_norm)
        heads = (block.attention.query_norm, block.attention.key_norm)
        yield from (each for each in (*own, *heads) if each is not None)
    yield from (each for each in (decoder.embedding.norm, decoder.norm) if each is not None)


def _norm(norm: Norm) -> Norm:
    weight, bias = (None if each is None else each.detach().clone() for each in (norm.weight, norm.bias))
    return attrs.evolve(norm, weight=weight, bias=bias)


def _parameters(tensors: Sequence[Tensor]) -> tuple[nn.Parameter, ...]:
    return tuple(each for each in tensors if isinstance(each, nn.Parameter))
