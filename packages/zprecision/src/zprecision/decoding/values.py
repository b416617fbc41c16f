"""Values that describe a decoder to the kernels: what a block computes, with the tensors that it reads.

Tensors are read where they lie at every call, so a change of the weights in place shows at once.  `unsupported` says
why the kernels cannot run a value; then the caller computes it with torch.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

import attrs
from torch import Tensor, bfloat16, float16, float32, int8

from zprecision.backends.native import is_addressable, reason_without
from zprecision.quant import PackedTensor, Weight
from zprecision.quant.panels import packed_once

__all__ = [
    *("Activation", "FusedAttention", "FusedBlock", "FusedCache", "FusedHead", "FusedMLP", "FusedMLPInput"),
    *("FusedJoin", "FusedMixture", "FusedNorm", "FusedProjection", "FusedRotary", "FusedSum", "held_weight"),
    "unsupported",
]

PLAIN = {float32: 0, bfloat16: 1, float16: 2}  # of weights and vectors; numbers of zq_api.h
CACHED = {**PLAIN, int8: 3}
MOST_CHOSEN = 16  # experts of a token


class Activation(enum.IntEnum):
    """Elementwise functions of the kernels; numbers of zq_api.h."""

    SILU = 0  # x sigmoid(x)
    GELU = 1  # x (1 + erf(x / sqrt(2))) / 2
    GELU_TANH = 2  # Hendrycks and Gimpel 2016, the approximation by tanh
    RELU = 3
    QUICK_GELU = 4  # x sigmoid(1.702 x)
    SQUARED_RELU = 5
    TANH = 6
    EXP = 7
    ERF = 8


class FusedMLPInput(enum.IntEnum):
    """Source of what the MLP reads; numbers of zq_api.h."""

    RESIDUAL = 0  # the sum of the block's input and the attention
    BLOCK = 1  # the block's input
    ATTENTION = 2  # what the attention reads, after its norm


@attrs.frozen(eq=False)
class FusedProjection:
    """x @ weight.T + bias."""

    weight: Weight  # (out, in): quantized to integers, or plain: contiguous, or the transpose of such a matrix
    bias: Tensor | None = None  # (out,)

    @property
    def is_transposed(self) -> bool:
        """Whether a plain weight lies as (in, out), as in Transformers' Conv1D."""
        weight = self.weight
        return isinstance(weight, Tensor) and not weight.is_contiguous() and weight.t().is_contiguous()


@attrs.frozen(kw_only=True, eq=False)
class FusedNorm:
    """RMSNorm or, if `is_centered`, LayerNorm, of `size` elements, with weight + offset."""

    size: int
    eps: float
    is_centered: bool
    weight: Tensor | None = None  # (size,)
    bias: Tensor | None = None  # (size,)
    offset: float = 0.0


@attrs.frozen(kw_only=True, eq=False)
class FusedRotary:
    """Rotation of the first 2 * table width features of a head, by position."""

    cos: Tensor  # (capacity, size / 2) float32
    sin: Tensor
    is_neighbours: bool  # features 2i and 2i + 1 are a pair, not i and i + size / 2


@attrs.frozen(kw_only=True, eq=False)
class FusedAttention:
    """Causal attention of grouped heads."""

    projections: tuple[FusedProjection, ...]  # queries, keys, values; or one that has all
    is_grouped: bool = False  # the one has for each kv head its queries, its key, its value
    out: FusedProjection
    num_heads: int
    num_kv_heads: int
    head_size: int
    query_norm: FusedNorm | None = None  # over a head, or over all
    key_norm: FusedNorm | None = None
    rotary: FusedRotary | None = None
    scale: float
    softcap: float = 0.0  # c tanh(score / c); 0: none
    window: int = 0  # positions that a query sees, its own included; 0: all before it


@attrs.frozen(kw_only=True, eq=False)
class FusedMLP:
    """down(act(up(x))), or with a gate down(act(gate(x)) * up(x))."""

    up: FusedProjection  # if `is_fused`, the gate's rows before its own
    down: FusedProjection
    act: Activation
    gate: FusedProjection | None = None
    is_fused: bool = False


@attrs.frozen(kw_only=True, eq=False)
class FusedMixture:
    """Mixture of experts: MLPs of which a router chooses `top_k` for each token.

    The softmax of the router's outputs weighs the experts; the largest `top_k` are chosen, of equal ones the first.
    """

    router: FusedProjection  # (experts, width)
    experts: tuple[FusedMLP, ...]  # of one size: all, or those held here
    top_k: int  # up to MOST_CHOSEN
    first: int = 0  # number of the first one held here; a block's `down_ranks` adds up what ranks compute
    is_renormalized: bool = False  # the chosen weights are divided by their sum
    factor: float = 1.0  # of the chosen weights
    shared: FusedMLP | None = None  # for all tokens, of any size
    shared_gate: FusedProjection | None = None  # (1, width): its sigmoid is the weight of the shared one; None: 1


@attrs.frozen(kw_only=True, eq=False)
class FusedCache:
    """Keys and values of one block, (slots, kv heads, capacity, head size); int8 with scales."""

    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None  # (slots, kv heads, capacity) float32
    value_scales: Tensor | None = None


@attrs.frozen(eq=False)
class FusedSum:
    """Ranks that hold columns of a last projection, each with its features of the input: terms of a sum."""

    add_up: Callable[[Tensor], object]  # replaces (n, width) float32 by the sum over ranks, in place


@attrs.frozen(eq=False)
class FusedJoin:
    """Ranks that hold rows of a last projection, which read the features of all: no sum is split."""

    join_inputs: Callable[[Tensor], Tensor]  # (n, own features) float32 -> (n, features of all ranks)
    join_outputs: Callable[[Tensor], Tensor]  # (n, own rows) float32 -> (n, width)


@attrs.frozen(kw_only=True, eq=False)
class FusedBlock:
    """x + attention, then + MLP; norms before each, and perhaps after each."""

    norm: FusedNorm | None
    attention: FusedAttention
    out_norm: FusedNorm | None = None  # of what the attention adds
    mlp_input: FusedMLPInput = FusedMLPInput.RESIDUAL
    mlp_norm: FusedNorm | None
    mlp: FusedMLP | FusedMixture
    mlp_out_norm: FusedNorm | None = None
    attention_factor: float = 1.0
    mlp_factor: float = 1.0
    out_ranks: FusedSum | FusedJoin | None = None  # over which the attention's last projection is split
    down_ranks: FusedSum | FusedJoin | None = None  # over which the MLP's is
    cache: FusedCache


@attrs.frozen(kw_only=True, eq=False)
class FusedHead:
    """Logits: factor * projection(norm(x)), then perhaps c tanh(logit / c)."""

    norm: FusedNorm | None
    projection: FusedProjection
    factor: float = 1.0
    softcap: float = 0.0


def held_weight(weight: Weight) -> Tensor | PackedTensor | None:
    """Return the weight in the order of the kernels; None for a format that they do not multiply."""
    if isinstance(weight, (Tensor, PackedTensor)):
        return weight
    packed = packed_once(weight)
    return packed if isinstance(packed, PackedTensor) else None


def unsupported(value: FusedBlock | FusedHead) -> str:
    """Return the reason why the kernels cannot run a value; empty if they can."""
    if (reason := reason_without()) is not None:
        return f"no kernels: {reason}"
    found = _reasons_block(value) if isinstance(value, FusedBlock) else _reasons_head(value)
    return next(found, "")


def _reasons_head(head: FusedHead) -> Iterator[str]:
    yield from _reasons_norm("norm", head.norm)
    yield from _reasons_projection("head", head.projection)


def _reasons_block(block: FusedBlock) -> Iterator[str]:
    attention = block.attention
    for each in attention.projections:
        yield from _reasons_projection("projection of queries, keys and values", each)
    yield from _reasons_projection("output projection", attention.out)
    yield from _reasons_mixture(block.mlp) if isinstance(block.mlp, FusedMixture) else _reasons_mlp("", block.mlp)
    norms = (block.norm, block.out_norm, block.mlp_norm, block.mlp_out_norm)
    for norm in (*norms, attention.query_norm, attention.key_norm):
        yield from _reasons_norm("norm", norm)
    for norm in (attention.query_norm, attention.key_norm):
        if norm is not None and norm.size != attention.head_size and attention.is_grouped:
            yield "norm of all heads of a projection that is ordered by key heads"
    yield from _reasons_cache(block.cache)
    if isinstance(block.mlp, FusedMixture) and isinstance(block.down_ranks, FusedJoin):
        yield "its experts are split over ranks by rows"


def _reasons_mlp(owner: str, mlp: FusedMLP) -> Iterator[str]:
    for name, projection in (("gate", mlp.gate), ("up projection", mlp.up), ("down projection", mlp.down)):
        if projection is not None:
            yield from _reasons_projection(f"{owner}{name}", projection)


def _reasons_mixture(mixture: FusedMixture) -> Iterator[str]:
    if mixture.top_k > MOST_CHOSEN:
        yield f"{mixture.top_k} experts are chosen for a token; kernels take up to {MOST_CHOSEN}"
    yield from _reasons_projection("router", mixture.router)
    for index, expert in enumerate(mixture.experts):
        yield from _reasons_mlp(f"expert {index}: ", expert)
    if mixture.shared is not None:
        yield from _reasons_mlp("shared expert: ", mixture.shared)
    if mixture.shared_gate is not None:
        yield from _reasons_projection("gate of the shared expert", mixture.shared_gate)


def _reasons_projection(name: str, projection: FusedProjection) -> Iterator[str]:
    weight = held_weight(projection.weight)
    if weight is None:
        yield f"{name}: its format is not one of integers"
    elif isinstance(weight, PackedTensor):
        if not is_addressable(weight.data):
            yield f"{name}: its weight is not in the memory of a CPU"
    elif not is_addressable(weight):
        yield f"{name}: its weight is not a plain tensor in the memory of a CPU"
    elif weight.dtype not in PLAIN:
        yield f"{name}: its weight is {weight.dtype}; plain weights must be float32, bfloat16 or float16"
    elif not weight.is_contiguous() and not projection.is_transposed:
        yield f"{name}: neither its rows nor its columns are contiguous"
    yield from _reasons_vector(name, projection.bias)


def _reasons_norm(name: str, norm: FusedNorm | None) -> Iterator[str]:
    if norm is not None:
        yield from _reasons_vector(name, norm.weight)
        yield from _reasons_vector(name, norm.bias)


def _reasons_vector(name: str, vector: Tensor | None) -> Iterator[str]:
    if vector is None:
        return
    if not is_addressable(vector) or not vector.is_contiguous():
        yield f"{name}: its vector is not a contiguous tensor in the memory of a CPU"
    elif vector.dtype not in PLAIN:
        yield f"{name}: its vector is {vector.dtype}; it must be float32, bfloat16 or float16"


def _reasons_cache(cache: FusedCache) -> Iterator[str]:
    if not is_addressable(cache.keys):
        yield "its cache is not in the memory of a CPU"
    elif cache.keys.dtype not in CACHED:
        yield f"its cache is {cache.keys.dtype}"
