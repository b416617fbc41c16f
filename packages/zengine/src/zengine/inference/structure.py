"""Values that describe a decoder: what a forward pass computes, with the module's own weights.

recognize.py makes them from a module; decoder.py runs them.  A tensor here is the module's parameter or a view of it,
so a change of the module's weights shows at once.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zpartition import ModelParallelGroup, tensor
from zprecision.quant import PackedTensor, QuantizedTensor, linear, linear_many

__all__ = [
    *("MLP", "Attention", "Block", "Decoder", "Embedding", "FusedQKV", "Head", "MLPInput", "Mixture", "Norm"),
    *("Over", "Projection", "Ranks", "Rotary", "RotaryStyle", "vocabulary_of"),
]

Unary = Callable[[Tensor], Tensor]


class Over(enum.Enum):
    """Part of a projection that a tensor-parallel rank holds, beside the rows of a plain projection."""

    COLUMNS = "columns"  # and its features of the input: what ranks give is summed
    ROWS = "rows"  # the features of all ranks are joined before, and what they give after
    OUTPUTS = "outputs"  # rows, of an input that all have: what they give is joined


@attrs.frozen(eq=False)
class Ranks:
    """Tensor-parallel ranks that hold the other parts of a projection.  All functions are collective."""

    over: Over
    group: ModelParallelGroup
    input_sizes: tuple[int, ...] = ()  # features of each rank
    output_sizes: tuple[int, ...] = ()  # rows of each rank

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of x over ranks, in place."""
        return tensor.reduce(x, self.group)

    def join_inputs(self, x: Tensor) -> Tensor:
        """Return (..., features of all ranks)."""
        return tensor.join_features(x, self.group, self.input_sizes)

    def join_outputs(self, x: Tensor) -> Tensor:
        """Return (..., rows of all ranks)."""
        return tensor.join_features(x, self.group, self.output_sizes)


@attrs.frozen(eq=False)
class Projection:
    """x @ weight.T + bias."""

    name: str  # of the module
    weight: Tensor | QuantizedTensor | PackedTensor  # (out, in)
    bias: Tensor | None = None  # (out,)
    ranks: Ranks | None = None  # over which it is split; None: weight and bias are all that there is here

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., in).  Returns (..., out)."""
        ranks = self.ranks
        if ranks is None:
            return self._product(x)
        if ranks.over is Over.COLUMNS:
            total = ranks.add_up(attrs.evolve(self, bias=None, ranks=None)(x).clone())
            return total if self.bias is None else total + self.bias
        return ranks.join_outputs(self._product(ranks.join_inputs(x) if ranks.over is Over.ROWS else x))

    def _product(self, x: Tensor) -> Tensor:
        if isinstance(self.weight, Tensor):
            return F.linear(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias)


def project_all(x: Tensor, projections: Sequence[Projection]) -> list[Tensor]:
    """Return the outputs of projections that read the same tensor: quantized once, in one list of work."""
    return linear_many(x, [each.weight for each in projections], [each.bias for each in projections])


@attrs.frozen(kw_only=True, eq=False)
class Norm:
    """RMSNorm (Zhang and Sennrich 2019) or, if `is_centered`, LayerNorm (Ba et al. 2016), over the last dim."""

    weight: Tensor | None  # (dim,)
    bias: Tensor | None = None  # (dim,)
    eps: float
    is_centered: bool
    offset: float = 0.0  # added to `weight`: Gemma's is stored minus one
    name: str = ""  # of the module

    def __call__(self, x: Tensor) -> Tensor:
        """Normalize in float32 (float64 for float64), and return the dtype of x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.is_centered:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            wide = wide * (self.weight.to(wide.dtype) + self.offset)
        if self.bias is not None:
            wide = wide + self.bias.to(wide.dtype)
        return wide.to(x.dtype)


class RotaryStyle(enum.Enum):
    """Pairs of features that are rotated together."""

    HALVES = "halves"  # feature i with i + size / 2
    NEIGHBOURS = "neighbours"  # feature 2i with 2i + 1


@attrs.frozen(kw_only=True, eq=False)
class Rotary:
    """Rotation of the first `size` features of queries and keys by position (Su et al. 2021)."""

    style: RotaryStyle
    size: int
    make_tables: Callable[[int], tuple[Tensor, Tensor]]  # number of positions -> cosines and sines, (n, size / 2)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: (batch, time, heads, head size); cos, sin: (batch or 1, time, size / 2) of the positions."""
        cos, sin = (table.unsqueeze(2).to(x.dtype) for table in (cos, sin))
        head, rest = x[..., : self.size], x[..., self.size :]
        if self.style is RotaryStyle.HALVES:
            first, second = head.chunk(2, dim=-1)
            turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:
            first, second = head[..., ::2], head[..., 1::2]
            turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def _cut(x: Tensor, *sizes: int) -> Tensor:
    """Cut the last dim into dims of these sizes."""
    return x.reshape(*x.shape[:-1], *sizes)


class FusedQKV(enum.Enum):
    """Order of the rows of one projection of queries, keys and values."""

    STACKED = "stacked"  # all queries, all keys, all values
    GROUPED = "grouped"  # by key head: its queries, its key, its value


@attrs.frozen(kw_only=True, eq=False)
class Attention:
    """Causal attention with grouped heads (Ainslie et al. 2023)."""

    projections: tuple[Projection, ...]  # queries, keys, values; or one of all
    fused: FusedQKV | None = None  # order of the one projection
    out: Projection
    num_heads: int
    num_kv_heads: int
    head_size: int
    query_norm: Norm | None = None  # over a head, or over all heads
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    scale: float  # of the scores
    softcap: float = 0.0  # c tanh(score / c); 0: none
    window: int = 0  # positions that a query sees, its own included; 0: all before it

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of x, (batch, time, width): (batch, time, heads, size) each, normalized."""
        parts = project_all(x, self.projections) if self.fused is None else [self.projections[0](x)]
        query, key, value = self.split(parts)
        return self._normed(query, self.query_norm), self._normed(key, self.key_norm), self._heads(value)

    def split(self, projected: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values, (..., heads * size) each, of the projections' outputs."""
        queries, groups, size = self.num_heads, self.num_kv_heads, self.head_size
        if self.fused is None:
            query, key, value = projected
        elif self.fused is FusedQKV.STACKED:
            query, key, value = torch.split(projected[0], [queries * size, groups * size, groups * size], dim=-1)
        else:
            both = _cut(projected[0], groups, queries // groups + 2, size)
            query, key, value = (
                both[..., :-2, :].flatten(-3),
                both[..., -2, :].flatten(-2),
                both[..., -1, :].flatten(-2),
            )
        return query, key, value

    def _heads(self, x: Tensor) -> Tensor:
        return _cut(x, x.shape[-1] // self.head_size, self.head_size)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return self._heads(x)
        is_whole = norm.weight is not None and norm.weight.numel() != self.head_size
        return self._heads(norm(x)) if is_whole else norm(self._heads(x))


@attrs.frozen(kw_only=True, eq=False)
class MLP:
    """down(act(up(x))), or with a gate down(act(gate(x)) * up(x)) (Shazeer 2020)."""

    up: Projection  # with `is_fused`, the gate's rows before its own
    down: Projection
    act: Unary
    gate: Projection | None = None
    is_fused: bool = False  # one projection of gate and up

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., width).  Returns the same shape."""
        if self.is_fused:
            gate, up = self.up(x).chunk(2, dim=-1)
            return self.down(self.act(gate) * up)
        if self.gate is None:
            return self.down(self.act(self.up(x)))
        gate, up = project_all(x, (self.gate, self.up))
        return self.down(self.act(gate) * up)


@attrs.frozen(kw_only=True, eq=False)
class Mixture:
    """Mixture of experts (Shazeer et al. 2017): MLPs of which a router chooses `top_k` for each position.

    The softmax of the router's outputs weighs them; the largest are chosen (Fedus et al. 2021, Jiang et al. 2024).
    """

    router: Projection  # (experts, width)
    experts: tuple[MLP, ...]  # all, or those that this rank holds
    top_k: int
    is_renormalized: bool = False  # the chosen weights are divided by their sum
    factor: float = 1.0  # of the chosen weights
    shared: MLP | None = None  # for all positions
    shared_gate: Projection | None = None  # (1, width): its sigmoid is the weight of the shared one; None: 1
    first: int = 0  # number of the first expert of `experts`
    ranks: Ranks | None = None  # that hold the others, and read the same; None: all are here

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., width).  Returns the same shape."""
        flat = x.reshape(-1, x.shape[-1])
        weights, chosen = self.route(flat)
        out = torch.zeros_like(flat)
        for expert in sorted(set(chosen.flatten().tolist())):
            if not 0 <= expert - self.first < len(self.experts):
                continue
            row, column = (chosen == expert).nonzero(as_tuple=True)
            y = self.experts[expert - self.first](flat[row]) * weights[row, column, None]
            out.index_add_(0, row, y.to(out.dtype))
        if self.ranks is not None:
            out = self.ranks.add_up(out)
        if self.shared is not None:
            common = self.shared(flat)
            out = out + (
                common if self.shared_gate is None else torch.sigmoid(_decided(self.shared_gate, flat)) * common
            )
        return out.view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights and numbers of the chosen experts, (n, top_k) each, of x, (n, width)."""
        outputs = _decided(self.router, x)
        probabilities = torch.softmax(outputs.to(torch.promote_types(outputs.dtype, torch.float32)), dim=-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        if self.is_renormalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return (weights * self.factor).to(x.dtype), chosen


def _decided(projection: Projection, x: Tensor) -> Tensor:
    """Return the projection of x by sums in float64.

    Torch's product with few rows rounds otherwise for other numbers of threads, and then other experts may be chosen.
    """
    weight, bias = projection.weight, projection.bias
    if not isinstance(weight, Tensor):
        return projection(x)
    return F.linear(x.double(), weight.double(), None if bias is None else bias.double()).to(x.dtype)


class MLPInput(enum.Enum):
    """Source of what the MLP reads."""

    RESIDUAL = "residual"  # the sum of the block's input and the attention
    BLOCK = "block"  # the block's input, through the MLP's own norm
    ATTENTION = "attention"  # what the attention reads


@attrs.frozen(kw_only=True, eq=False)
class Block:
    """x + attention, then + MLP; norms before each, and perhaps after each."""

    name: str
    attention_norm: Norm | None
    attention: Attention
    attention_out_norm: Norm | None = None  # of what the attention adds
    mlp_input: MLPInput
    mlp_norm: Norm | None
    mlp: MLP | Mixture | nn.Module  # a module: not recognised, and called as it is
    mlp_out_norm: Norm | None = None
    attention_factor: float = 1.0  # of what the attention adds
    mlp_factor: float = 1.0

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Of the attention and, if it is recognised, of the MLP."""
        mlp = (self.mlp.gate, self.mlp.up, self.mlp.down) if isinstance(self.mlp, MLP) else ()
        return (*self.attention.projections, self.attention.out, *(each for each in mlp if each is not None))


def vocabulary_of(module: object, rows: Tensor) -> int:
    """Return the number of tokens of an embedding, of which `rows` are held here."""
    if isinstance(module, tensor.SplitLayer):
        return module.placement.addresses["weight"].global_shape[0]
    return rows.shape[0]


@attrs.frozen(kw_only=True, eq=False)
class Embedding:
    """factor * tokens[id] + positions[position + offset], then perhaps a norm."""

    tokens: Tensor  # (vocabulary, width); if it is split over ranks, some of the rows
    lookup: Callable[[Tensor], Tensor] | None = None  # looks up the rows of all ranks; None: `tokens` has all
    num_tokens: int = 0  # on all ranks; 0: as many as `lookup`, or `tokens`, has
    factor: float = 1.0
    positions: Tensor | None = None  # (positions, width)
    offset: int = 0
    norm: Norm | None = None

    @property
    def vocabulary(self) -> int:
        """Number of tokens, on all ranks."""
        return self.num_tokens or vocabulary_of(self.lookup, self.tokens)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """ids, positions: (batch, time) int64.  Returns (batch, time, width)."""
        x = self.summed(ids, positions)
        return x if self.norm is None else self.norm(x)

    def summed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return what the norm reads."""
        x: Tensor = F.embedding(ids, self.tokens) if self.lookup is None else self.lookup(ids)
        if self.factor != 1.0:
            x = x * self.factor
        if self.positions is not None:
            x = x + F.embedding(positions + self.offset, self.positions)
        return x


@attrs.frozen(kw_only=True, eq=False)
class Head:
    """Logits: factor * (x @ weight.T + bias), then perhaps c tanh(logit / c)."""

    projection: Projection
    factor: float = 1.0
    softcap: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """x: (..., width).  Returns (..., vocabulary) float32 (float64 for float64)."""
        logits = self.projection(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.factor != 1.0:
            logits = logits * self.factor
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


@attrs.frozen(kw_only=True, eq=False)
class Decoder:
    """A decoder-only language model."""

    embedding: Embedding
    blocks: tuple[Block, ...]
    norm: Norm | None
    head: Head

    @property
    def max_positions(self) -> int | None:
        """Positions that the model has, if it learnt a vector for each; else None."""
        positions = self.embedding.positions
        return None if positions is None else positions.shape[0] - self.embedding.offset

    @property
    def chooses_experts(self) -> bool:
        """Whether a block has, or may have, a router, so that rounding may choose another expert."""
        return any(not isinstance(block.mlp, MLP) for block in self.blocks)

    @property
    def opaque(self) -> tuple[str, ...]:
        """Names of the modules that are called as they are."""
        return tuple(f"{block.name}.mlp" for block in self.blocks if isinstance(block.mlp, nn.Module))
