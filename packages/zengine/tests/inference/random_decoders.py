"""Decoders with random weights, as values: every form that a block can have, with odd sizes."""

from __future__ import annotations

import functools

import attrs
import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.inference.structure import (
    MLP,
    Attention,
    Block,
    Decoder,
    Embedding,
    FusedQKV,
    Head,
    Mixture,
    MLPInput,
    Norm,
    Projection,
    Rotary,
    RotaryStyle,
    Unary,
)

VOCABULARY = 83


@attrs.frozen(kw_only=True)
class Form:
    """What a decoder computes; the default is LLaMA's form with seven query heads to one."""

    width: int = 56
    heads: int = 7
    kv_heads: int = 1
    size: int = 8
    grown: int = 88
    blocks: int = 2
    fused: FusedQKV | None = None
    bias: bool = False
    centered: bool = False  # LayerNorm
    offset: float = 0.0  # of the norms' weights
    norms: bool = True  # before attention and MLP
    head_norm: str = ""  # "head", "all": of queries and keys
    rotary: RotaryStyle | None = RotaryStyle.HALVES
    rotary_size: int = 8
    scale: float = 0.4
    softcap: float = 0.0
    window: int = 0
    mlp: str = "gated"  # or "plain", "fused"
    act: Unary = F.silu
    mlp_input: MLPInput = MLPInput.RESIDUAL
    out_norms: bool = False
    factors: tuple[float, float] = (1.0, 1.0)
    tied: bool = False
    head_factor: float = 1.0
    head_softcap: float = 0.0
    embedding_norm: bool = False
    experts: int = 0  # of a mixture in the place of the MLP
    chosen: int = 2
    renormalized: bool = True
    shared: str = ""  # "plain", "gated": weighed by a gate


FORMS = {
    "seven to one": Form(),
    "tied, grouped heads of 20": Form(width=44, heads=6, kv_heads=2, size=20, rotary_size=20, tied=True),
    "stacked projection, biases, LayerNorm": Form(
        fused=FusedQKV.STACKED, kv_heads=7, bias=True, centered=True, mlp="plain", act=F.gelu, rotary=None
    ),
    "grouped projection, parallel MLP": Form(
        fused=FusedQKV.GROUPED, heads=4, kv_heads=4, size=14, rotary_size=6, centered=True, bias=True, mlp="plain",
        act=F.gelu, mlp_input=MLPInput.BLOCK,
    ),
    "MLP of the attention's input, neighbours": Form(
        rotary=RotaryStyle.NEIGHBOURS, mlp_input=MLPInput.ATTENTION, mlp="plain", act=F.relu, heads=3, kv_heads=3,
        size=16,
    ),
    "norms of heads": Form(head_norm="head", heads=4, kv_heads=2, size=16, rotary_size=16),
    "norms of all heads, norms after": Form(head_norm="all", heads=6, kv_heads=3, norms=False, out_norms=True),
    "soft caps, window, norms after, offsets": Form(
        softcap=5.0, window=9, out_norms=True, offset=1.0, head_softcap=8.0, head_factor=0.7, mlp="fused", grown=72
    ),
    "fused gate that no panel divides, factors": Form(
        mlp="fused", grown=75, factors=(0.6, 1.3), bias=True, embedding_norm=True, head_factor=0.3
    ),
    "mixture": Form(experts=5),
    "mixture with a gated shared expert, norms after": Form(
        experts=19, chosen=3, renormalized=False, shared="gated", mlp="fused", grown=40, out_norms=True
    ),
    "mixture of plain MLPs beside the attention": Form(
        experts=4, chosen=1, renormalized=False, shared="plain", mlp="plain", act=F.gelu, bias=True, grown=75,
        mlp_input=MLPInput.BLOCK, factors=(0.7, 1.4),
    ),
    "wide heads": Form(width=96, heads=2, kv_heads=1, size=80, rotary_size=80, grown=130),
}  # fmt: skip


class Draw:
    """Random tensors of one dtype, in the order of the calls."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.generator = dtype, torch.Generator().manual_seed(3)

    def __call__(self, *shape: int, size: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=self.generator) * size).to(self.dtype)

    def projection(self, rows: int, columns: int, bias: bool, name: str) -> Projection:
        return Projection(name, self(rows, columns, size=1.2 * columns**-0.5), self(rows, size=0.2) if bias else None)

    def norm(self, size: int, form: Form) -> Norm:
        return Norm(
            weight=self(size, size=0.2) + (1.0 - form.offset),
            bias=self(size, size=0.1) if form.centered else None,
            eps=1e-5,
            is_centered=form.centered,
            offset=form.offset,
        )


def tables(half: int, count: int) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(count), 50.0 ** -(torch.arange(half) / half))
    return angles.cos(), angles.sin()


def make(form: Form, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of that form; the same values, rounded, in every dtype."""
    draw = Draw(dtype)
    tokens = draw(VOCABULARY, form.width)
    rotary = None
    if form.rotary is not None:
        table = functools.partial(tables, form.rotary_size // 2)
        rotary = Rotary(style=form.rotary, size=form.rotary_size, make_tables=table)
    embedding = Embedding(
        tokens=tokens,
        factor=1.5,
        positions=None if rotary else draw(512, form.width),
        norm=draw.norm(form.width, form) if form.embedding_norm else None,
    )
    blocks = tuple(_block(draw, form, f"blocks.{index}", rotary) for index in range(form.blocks))
    head = Projection("head", tokens) if form.tied else draw.projection(VOCABULARY, form.width, form.bias, "head")
    return Decoder(
        embedding=embedding,
        blocks=blocks,
        norm=draw.norm(form.width, form),
        head=Head(projection=head, factor=form.head_factor, softcap=form.head_softcap),
    )


def _block(draw: Draw, form: Form, name: str, rotary: Rotary | None) -> Block:
    queries, keys = form.heads * form.size, form.kv_heads * form.size
    rows = (queries, keys, keys) if form.fused is None else (queries + 2 * keys,)
    norm_sizes = {"": None, "head": (form.size, form.size), "all": (queries, keys)}[form.head_norm]
    attention = Attention(
        projections=tuple(draw.projection(each, form.width, form.bias, f"{name}.{each}") for each in rows),
        fused=form.fused,
        out=draw.projection(form.width, queries, form.bias, f"{name}.out"),
        num_heads=form.heads,
        num_kv_heads=form.kv_heads,
        head_size=form.size,
        query_norm=draw.norm(norm_sizes[0], form) if norm_sizes else None,
        key_norm=draw.norm(norm_sizes[1], form) if norm_sizes else None,
        rotary=rotary,
        scale=form.scale,
        softcap=form.softcap,
        window=form.window,
    )
    mlp = _mixture(draw, form, name) if form.experts else _mlp(draw, form, name, form.grown)
    has_mlp_norm = form.norms and form.mlp_input is not MLPInput.ATTENTION
    return Block(
        name=name,
        attention_norm=draw.norm(form.width, form) if form.norms else None,
        attention=attention,
        attention_out_norm=draw.norm(form.width, form) if form.out_norms else None,
        mlp_input=form.mlp_input,
        mlp_norm=draw.norm(form.width, form) if has_mlp_norm else None,
        mlp=mlp,
        mlp_out_norm=draw.norm(form.width, form) if form.out_norms else None,
        attention_factor=form.factors[0],
        mlp_factor=form.factors[1],
    )


def _mlp(draw: Draw, form: Form, name: str, grown: int) -> MLP:
    rows = 2 * grown if form.mlp == "fused" else grown
    return MLP(
        up=draw.projection(rows, form.width, form.bias, f"{name}.up"),
        down=draw.projection(form.width, grown, form.bias, f"{name}.down"),
        act=form.act,
        gate=draw.projection(grown, form.width, form.bias, f"{name}.gate") if form.mlp == "gated" else None,
        is_fused=form.mlp == "fused",
    )


def _mixture(draw: Draw, form: Form, name: str) -> Mixture:
    return Mixture(
        router=draw.projection(form.experts, form.width, False, f"{name}.router"),
        experts=tuple(_mlp(draw, form, f"{name}.experts.{index}", form.grown) for index in range(form.experts)),
        top_k=form.chosen,
        is_renormalized=form.renormalized,
        factor=1.0 if form.renormalized else 1.7,
        shared=_mlp(draw, form, f"{name}.shared", form.grown + 24) if form.shared else None,
        shared_gate=draw.projection(1, form.width, False, f"{name}.gate") if form.shared == "gated" else None,
    )
