"""Quantized weights of a decoder.

`quantized` replaces the matrices of a decoder, one at a time, so beside the old and the new weights it needs memory
for one matrix.  Four bits do not suit every layer: one whose error is over three times the median gets eight.
Embeddings, norms and routers of experts keep their dtype, and so does the head unless `head` is set.

The new decoder holds no reference to the matrices that it replaced.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TypeVar

import attrs
import torch
from torch import Tensor, nn

from zengine.inference.structure import MLP, Block, Decoder, Mixture, Projection
from zprecision.quant import Format, Int8, PackedTensor, QuantizedTensor, dequantize, format_name, pack, quantize

__all__ = [
    "OUTLIER",
    "LayerError",
    "QuantizationReport",
    "projections",
    "quantize_weight",
    "quantized",
    "replaced",
]

T = TypeVar("T")

OUTLIER = 3.0  # times the median error, above which a layer stays at 8 bits
_MEASURED_NUMEL = 1 << 20  # elements whose error stands for that of a large matrix


@attrs.frozen(kw_only=True)
class LayerError:
    """One quantized matrix."""

    name: str
    format: str
    error: float  # root mean square of the rounding, over that of the weights
    nbytes: int


@attrs.frozen(kw_only=True)
class QuantizationReport:
    """All quantized matrices, in the order of the model."""

    layers: tuple[LayerError, ...]
    kept: tuple[str, ...]  # names of those whose format was too coarse; they have 8 bits

    @property
    def nbytes(self) -> int:
        """Bytes of the quantized weights."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def worst(self) -> tuple[LayerError, ...]:
        """The five layers with the largest errors."""
        return tuple(sorted(self.layers, key=lambda layer: -layer.error)[:5])


def projections(decoder: Decoder, *, routers: bool = True) -> Iterator[Projection]:
    """Yield the projections of all blocks, then the head's.

    routers: those that choose experts, and the gates of shared experts, too.
    """
    for block in decoder.blocks:
        yield from block.attention.projections
        yield block.attention.out
        mlps: tuple[MLP | None, ...] = ()
        if isinstance(block.mlp, MLP):
            mlps = (block.mlp,)
        elif isinstance(block.mlp, Mixture):
            mlps = (*block.mlp.experts, block.mlp.shared)
            if routers:
                yield from (each for each in (block.mlp.router, block.mlp.shared_gate) if each is not None)
        for mlp in mlps:
            if mlp is not None:
                yield from (each for each in (mlp.gate, mlp.up, mlp.down) if each is not None)
    yield decoder.head.projection


@torch.no_grad()
def quantized(decoder: Decoder, format: Format, *, head: bool = True) -> tuple[Decoder, QuantizationReport]:
    """Return the decoder with quantized projections, packed for products, and a report.

    format: of all projections but the outliers.  head: quantize the projection to the vocabulary, too.

    Raises ValueError if a projection is quantized already.
    """
    made: dict[int, Projection] = {}
    rows: dict[int, LayerError] = {}
    plain = [each for each in projections(decoder, routers=False) if head or each is not decoder.head.projection]
    for each in plain:
        made[id(each)], rows[id(each)] = _quantize(each, format)
    median = statistics.median(row.error for row in rows.values())
    outliers = [each for each in plain if rows[id(each)].error > OUTLIER * median and not isinstance(format, Int8)]
    for each in outliers:
        made[id(each)], rows[id(each)] = _quantize(each, Int8())
    report = QuantizationReport(layers=tuple(rows.values()), kept=tuple(each.name for each in outliers))
    return replaced(decoder, lambda each: made.get(id(each), each)), report


def _quantize(projection: Projection, format: Format) -> tuple[Projection, LayerError]:
    if not isinstance(projection.weight, Tensor):
        raise ValueError(f"{projection.name} is quantized already: pass the model with its plain weights")
    weight, row = quantize_weight(projection.name, projection.weight, format)
    return attrs.evolve(projection, weight=weight), row


def quantize_weight(name: str, weight: Tensor, format: Format) -> tuple[PackedTensor | QuantizedTensor, LayerError]:
    """Quantize and pack one matrix, (out, in); returns it with its row of the report."""
    values = quantize(weight.detach(), format)
    row = LayerError(name=name, format=format_name(format), error=_error(weight, values), nbytes=values.nbytes)
    return pack(values), row


def _error(weight: Tensor, values: QuantizedTensor) -> float:
    """Return the relative error of some rows, evenly spaced: all of a small matrix."""
    step = max(1, weight.numel() // _MEASURED_NUMEL)
    wanted, found = weight[::step].float(), values.map(lambda part: part[::step])
    found = attrs.evolve(found, shape=tuple(wanted.shape))
    size = float(wanted.norm())
    return float((dequantize(found, torch.float32) - wanted).norm()) / (size or 1.0)


def replaced(decoder: Decoder, new: Callable[[Projection], Projection]) -> Decoder:
    """Return the decoder with `new(projection)` in the place of every projection."""

    def in_block(block: Block) -> Block:
        attention = attrs.evolve(
            block.attention,
            projections=tuple(map(new, block.attention.projections)),
            out=new(block.attention.out),
        )
        return attrs.evolve(block, attention=attention, mlp=in_any(block.mlp))

    def in_any(mlp: MLP | Mixture | nn.Module) -> MLP | Mixture | nn.Module:
        if isinstance(mlp, Mixture):
            return attrs.evolve(
                mlp,
                router=new(mlp.router),
                experts=tuple(map(in_mlp, mlp.experts)),
                shared=None if mlp.shared is None else in_mlp(mlp.shared),
                shared_gate=None if mlp.shared_gate is None else new(mlp.shared_gate),
            )
        return in_mlp(mlp) if isinstance(mlp, MLP) else mlp

    def in_mlp(mlp: MLP) -> MLP:
        gate = None if mlp.gate is None else new(mlp.gate)
        return attrs.evolve(mlp, up=new(mlp.up), down=new(mlp.down), gate=gate)

    head = attrs.evolve(decoder.head, projection=new(decoder.head.projection))
    return attrs.evolve(decoder, blocks=tuple(map(in_block, decoder.blocks)), head=head)
