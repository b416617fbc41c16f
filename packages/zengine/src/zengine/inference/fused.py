"""Fused decoding: the parts of a decoder that one call of C computes for all sequences of a step.

Problem.  A step of decoding reads each weight once and does little with it, so what torch's operators cost besides
(a dozen calls a block, a pass over the weights for each sequence) is as much as the reading.

Design.  `Fusion.make` translates every block that zprecision's kernels can run, and gives a reason for every other;
blocks that follow each other are one call, and the last call computes the logits, too.  Weights are those of the
decoder, read in place: changed values show at once, and new memory of a parameter makes a new translation.  A decoder
of which nothing is fused is logged once, with the reason: it is several times slower.

Rejected: all or nothing (one block with experts would slow down the whole model); a copy of the weights in an order
of our own (twice the memory; packed weights have that order already).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar, final

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.inference.cache import KVCache
from zengine.inference.matching import gelu_tanh, quick_gelu, squared_relu
from zengine.inference.structure import (
    MLP,
    Attention,
    Decoder,
    FusedQKV,
    Head,
    Mixture,
    MLPInput,
    Norm,
    Over,
    Projection,
    Ranks,
    Rotary,
    RotaryStyle,
)
from zprecision import decoding

__all__ = ["Fusion", "FusionReport"]

log = logging.getLogger("zengine")

Tables = Mapping[int, tuple[Tensor, Tensor]]  # by the identity of their maker

_ACTIVATIONS: dict[Callable[[Tensor], Tensor], decoding.Activation] = {
    F.silu: decoding.Activation.SILU,
    F.gelu: decoding.Activation.GELU,
    gelu_tanh: decoding.Activation.GELU_TANH,
    F.relu: decoding.Activation.RELU,
    quick_gelu: decoding.Activation.QUICK_GELU,
    squared_relu: decoding.Activation.SQUARED_RELU,
    torch.tanh: decoding.Activation.TANH,
}
_INPUTS = {
    MLPInput.RESIDUAL: decoding.FusedMLPInput.RESIDUAL,
    MLPInput.BLOCK: decoding.FusedMLPInput.BLOCK,
    MLPInput.ATTENTION: decoding.FusedMLPInput.ATTENTION,
}
Value = TypeVar("Value", decoding.FusedBlock, decoding.FusedHead)
HEAD = "head"  # the last norm and the projection to the vocabulary, in reports


@attrs.frozen(kw_only=True)
class FusionReport:
    """Blocks, by name, and the head."""

    fused: tuple[str, ...]  # run in C
    reasons: dict[str, str]  # name -> why torch runs it

    def __str__(self) -> str:
        total = len(self.fused) + len(self.reasons)
        rows = [f"{name}: {reason}" for name, reason in self.reasons.items()]
        return "; ".join([f"{len(self.fused)} of {total} parts are fused", *rows])


@attrs.frozen(kw_only=True)
class Part:
    """Blocks that follow each other, fused or not."""

    blocks: range  # of the decoder
    fused: range | None  # the same among the fused blocks; None: torch runs them
    with_head: bool = False


class _NotFusedError(Exception):
    """A block that has no translation; the message is the reason."""


@final
@attrs.frozen(eq=False)
class Fusion:
    """The fused parts of a decoder over one cache."""

    report: FusionReport
    parts: tuple[Part, ...]
    kernels: decoding.FusedDecoder | None  # None: nothing is fused
    head_ranks: Ranks | None = None  # over which the vocabulary is split

    most_sequences = decoding.MOST_SEQUENCES  # of one run

    @classmethod
    def make(cls, decoder: Decoder, cache: KVCache, tables: Tables) -> Fusion:
        """Translate what can be translated.

        tables: cosines and sines of all positions, (capacity, size / 2), by id(rotary.make_tables).
        """
        narrow = {key: (cos.float().contiguous(), sin.float().contiguous()) for key, (cos, sin) in tables.items()}
        made: dict[int, decoding.FusedBlock] = {}
        reasons: dict[str, str] = {}
        for index, block in enumerate(decoder.blocks):
            found = _or_reason(functools.partial(_block, decoder, index, cache, narrow))
            if isinstance(found, str):
                reasons[block.name] = found
            else:
                made[index] = found
        head = _or_reason(functools.partial(_head, decoder))
        if isinstance(head, str):
            reasons[HEAD] = head
        names = [decoder.blocks[index].name for index in made]
        fused = (*names, *(() if HEAD in reasons else (HEAD,)))
        kernels = None
        if fused:
            kernels = decoding.FusedDecoder(
                list(made.values()),
                None if isinstance(head, str) else head,
                width=decoder.embedding.tokens.shape[1],
                capacity=cache.capacity,
            )
        else:
            _log_once(next(iter(reasons.values())))
        parts = _parts(len(decoder.blocks), tuple(made), with_head=HEAD not in reasons)
        return cls(FusionReport(fused=fused, reasons=reasons), parts, kernels, decoder.head.projection.ranks)

    @property
    def is_current(self) -> bool:
        """Whether the weights are still in the memory that the kernels read."""
        return self.kernels is None or self.kernels.is_current

    def run(self, x: Tensor, slots: Sequence[int], positions: Sequence[int], part: Part) -> Tensor | None:
        """Advance (n, width) float32 in place; return the logits, (n, vocabulary), if the part has the head."""
        assert self.kernels is not None
        assert part.fused is not None
        logits = self.kernels.run(x, slots, positions, part.fused, with_head=part.with_head)
        return logits if logits is None or self.head_ranks is None else self.head_ranks.join_outputs(logits)


def _parts(num_blocks: int, fused: Sequence[int], *, with_head: bool) -> tuple[Part, ...]:
    """Return the longest runs of blocks that are fused, or that are not; the head belongs to the last if fused."""
    parts: list[Part] = []
    done = 0  # fused blocks so far
    at = 0
    while at < num_blocks:
        is_fused, end = at in fused, at + 1
        while end < num_blocks and (end in fused) == is_fused:
            end += 1
        parts.append(Part(blocks=range(at, end), fused=range(done, done + end - at) if is_fused else None))
        done += end - at if is_fused else 0
        at = end
    if with_head and parts[-1].fused is not None:
        parts[-1] = attrs.evolve(parts[-1], with_head=True)
    elif with_head:
        parts.append(Part(blocks=range(num_blocks, num_blocks), fused=range(done, done), with_head=True))
    return tuple(parts)


@functools.cache
def _log_once(reason: str) -> None:
    log.warning("no part of the decoder is fused, so torch decodes, one sequence after the other: %s", reason)


# -- translation -----------------------------------------------------------------------------


def _or_reason(make: Callable[[], Value]) -> Value | str:
    try:
        value = make()
    except _NotFusedError as error:
        return str(error)
    return decoding.unsupported(value) or value


def _block(decoder: Decoder, index: int, cache: KVCache, tables: Tables) -> decoding.FusedBlock:
    block, width = decoder.blocks[index], decoder.embedding.tokens.shape[1]
    _check_dtype(decoder)
    if not isinstance(block.mlp, (MLP, Mixture)):
        raise _NotFusedError(f"its MLP is called as it is ({type(block.mlp).__name__})")
    return decoding.FusedBlock(
        norm=_norm(block.attention_norm, width),
        attention=_attention(block.attention, tables),
        out_norm=_norm(block.attention_out_norm, width),
        mlp_input=_INPUTS[block.mlp_input],
        mlp_norm=_norm(block.mlp_norm, width),
        mlp=_mixture(block.mlp) if isinstance(block.mlp, Mixture) else _mlp(block.mlp),
        mlp_out_norm=_norm(block.mlp_out_norm, width),
        attention_factor=block.attention_factor,
        mlp_factor=block.mlp_factor,
        out_ranks=_exchange(block.attention.out.ranks, block.attention.out.name),
        down_ranks=_down_ranks(block.mlp),
        cache=decoding.FusedCache(
            keys=cache.keys[index],
            values=cache.values[index],
            key_scales=cache.key_scales[index] if cache.key_scales else None,
            value_scales=cache.value_scales[index] if cache.value_scales else None,
        ),
    )


def _exchange(ranks: Ranks | None, name: str) -> decoding.FusedSum | decoding.FusedJoin | None:
    """Return how ranks exchange what a last projection, of attention or MLP, reads and gives."""
    if ranks is None:
        return None
    if ranks.over is Over.COLUMNS:
        return decoding.FusedSum(ranks.add_up)
    if ranks.over is Over.ROWS:
        return decoding.FusedJoin(ranks.join_inputs, ranks.join_outputs)
    raise _NotFusedError(f"{name} is split by outputs, of an input that all ranks have")


def _down_ranks(mlp: MLP | Mixture) -> decoding.FusedSum | decoding.FusedJoin | None:
    if isinstance(mlp, MLP):
        return _exchange(mlp.down.ranks, mlp.down.name)
    mlps = (*mlp.experts, *(() if mlp.shared is None else (mlp.shared,)))
    if any(each.down.ranks is not None for each in mlps):
        raise _NotFusedError("its experts are split over ranks")
    return _exchange(mlp.ranks, "a mixture")


def _head(decoder: Decoder) -> decoding.FusedHead:
    _check_dtype(decoder)
    head: Head = decoder.head
    return decoding.FusedHead(
        norm=_norm(decoder.norm, decoder.embedding.tokens.shape[1]),
        projection=_projection(head.projection),
        factor=head.factor,
        softcap=head.softcap,
    )


def _check_dtype(decoder: Decoder) -> None:
    if decoder.embedding.tokens.dtype == torch.float64:
        raise _NotFusedError("the model computes in float64")


def _attention(attention: Attention, tables: Tables) -> decoding.FusedAttention:
    size = attention.head_size
    return decoding.FusedAttention(
        projections=tuple(map(_projection, attention.projections)),
        is_grouped=attention.fused is FusedQKV.GROUPED,
        out=_projection(attention.out),
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_size=size,
        query_norm=_norm(attention.query_norm, size),
        key_norm=_norm(attention.key_norm, size),
        rotary=None if attention.rotary is None else _rotary(attention.rotary, tables),
        scale=attention.scale,
        softcap=attention.softcap,
        window=attention.window,
    )


def _rotary(rotary: Rotary, tables: Tables) -> decoding.FusedRotary:
    cos, sin = tables[id(rotary.make_tables)]
    return decoding.FusedRotary(cos=cos, sin=sin, is_neighbours=rotary.style is RotaryStyle.NEIGHBOURS)


def _mlp(mlp: MLP) -> decoding.FusedMLP:
    act = _ACTIVATIONS.get(mlp.act)
    if act is None:
        raise _NotFusedError(f"no kernel for the activation {getattr(mlp.act, '__name__', mlp.act)!r}")
    return decoding.FusedMLP(
        up=_projection(mlp.up),
        down=_projection(mlp.down),
        act=act,
        gate=None if mlp.gate is None else _projection(mlp.gate),
        is_fused=mlp.is_fused,
    )


def _mixture(mixture: Mixture) -> decoding.FusedMixture:
    # of ranks that hold other experts one adds the shared expert
    has_shared = mixture.shared is not None and (mixture.ranks is None or mixture.ranks.group.rank == 0)
    return decoding.FusedMixture(
        router=_projection(mixture.router),
        experts=tuple(map(_mlp, mixture.experts)),
        top_k=mixture.top_k,
        is_renormalized=mixture.is_renormalized,
        factor=mixture.factor,
        first=mixture.first,
        shared=_mlp(mixture.shared) if has_shared and mixture.shared is not None else None,
        shared_gate=_projection(mixture.shared_gate) if has_shared and mixture.shared_gate is not None else None,
    )


def _projection(projection: Projection) -> decoding.FusedProjection:
    ranks, bias = projection.ranks, projection.bias
    if ranks is not None and ranks.over is Over.COLUMNS and ranks.group.rank:
        bias = None  # one rank's term of the sum has it
    return decoding.FusedProjection(projection.weight, bias)


def _norm(norm: Norm | None, size: int) -> decoding.FusedNorm | None:
    """size: elements of a row, if the norm has no weight."""
    if norm is None:
        return None
    return decoding.FusedNorm(
        size=size if norm.weight is None else norm.weight.numel(),
        eps=norm.eps,
        is_centered=norm.is_centered,
        weight=norm.weight,
        bias=norm.bias,
        offset=norm.offset,
    )
