"""C structs of a decoder: zq_api.h says what their fields mean."""

from __future__ import annotations

from typing import Any

import attrs
from torch import Tensor

from zprecision.backends.native import Library
from zprecision.decoding.values import (
    CACHED,
    PLAIN,
    FusedAttention,
    FusedBlock,
    FusedHead,
    FusedJoin,
    FusedMixture,
    FusedMLP,
    FusedNorm,
    FusedProjection,
    FusedSum,
    held_weight,
)
from zprecision.quant.kernels import describe
from zprecision.quant.panels import PackedTensor, product_format

__all__ = ["Writer"]

_SPLITS: dict[type, int] = {type(None): 0, FusedSum: 1, FusedJoin: 2}  # numbers of zq_api.h


@attrs.frozen(eq=False)
class Writer:
    """Writes values into structs, and keeps the tensors whose addresses they hold."""

    found: Library
    tensors: list[Tensor] = attrs.field(factory=list)  # of views, what they are views of; each once
    known: set[int] = attrs.field(factory=set)  # their identities
    structs: list[Any] = attrs.field(factory=list)  # memory that structs point to
    num_parts: set[int] = attrs.field(factory=lambda: {1})  # of the activations of all matrices

    def block(self, entry: Any, block: FusedBlock, width: int) -> None:
        """Fill a zq_block."""
        norms = (block.norm, block.out_norm, block.mlp_norm, block.mlp_out_norm)
        for name, norm in zip(("norm", "out_norm", "mlp_norm", "mlp_out_norm"), norms, strict=True):
            self.norm(getattr(entry, name), norm)
        self._attention(entry, block.attention)
        if isinstance(block.mlp, FusedMixture):
            entry.mixture = self._mixture(block.mlp)
        else:
            self._mlp(entry.mlp, block.mlp)
        entry.attention_factor, entry.mlp_factor = block.attention_factor, block.mlp_factor
        entry.mlp_input = int(block.mlp_input)
        entry.out_split, entry.down_split = _SPLITS[type(block.out_ranks)], _SPLITS[type(block.down_ranks)]
        cache = block.cache
        entry.keys, entry.values = self._at("void *", cache.keys), self._at("void *", cache.values)
        entry.key_scales, entry.value_scales = (
            self._at("float *", scales) for scales in (cache.key_scales, cache.value_scales)
        )
        entry.cache_dtype = CACHED[cache.keys.dtype]

    def head(self, entry: Any, head: FusedHead) -> None:
        """Fill the head of a zq_decoder."""
        self.norm(entry.norm, head.norm)
        self.projection(entry.head, head.projection)
        entry.head_factor, entry.head_softcap = head.factor, head.softcap

    def norm(self, entry: Any, norm: FusedNorm | None) -> None:
        """Fill a zq_norm; it stays empty for None."""
        if norm is None:
            return
        entry.size, entry.eps, entry.offset, entry.is_centered = norm.size, norm.eps, norm.offset, norm.is_centered
        for name, vector in (("weight", norm.weight), ("bias", norm.bias)):
            setattr(entry, name, self._at("void *", vector))
            setattr(entry, f"{name}_dtype", 0 if vector is None else PLAIN[vector.dtype])

    def projection(self, entry: Any, projection: FusedProjection) -> None:
        """Fill a zq_projection."""
        weight, bias = held_weight(projection.weight), projection.bias
        assert weight is not None
        entry.columns = weight.shape[1]
        if isinstance(weight, PackedTensor):
            describe(entry.matrix, weight.shape[0], product_format(weight.format), -(-weight.shape[1] // 32) * 32)
            entry.matrix.data, entry.dtype = self._at("uint8_t *", weight.data), -1
            self.num_parts.add(entry.matrix.num_parts)
        else:
            describe(entry.matrix, weight.shape[0], None, 0)
            entry.matrix.data, entry.dtype = self._at("uint8_t *", weight), PLAIN[weight.dtype]
            entry.is_transposed = projection.is_transposed
        entry.bias = self._at("void *", bias)
        entry.bias_dtype = 0 if bias is None else PLAIN[bias.dtype]

    def _attention(self, entry: Any, attention: FusedAttention) -> None:
        size, kv_heads = attention.head_size, attention.num_kv_heads
        group = attention.num_heads // kv_heads
        for part, projection in zip(entry.qkv, attention.projections):
            self.projection(part, projection)
        self.projection(entry.out, attention.out)
        self.norm(entry.query_norm, attention.query_norm)
        self.norm(entry.key_norm, attention.key_norm)
        entry.num_qkv, entry.num_heads = len(attention.projections), attention.num_heads
        entry.num_kv_heads, entry.head_size = kv_heads, size
        if attention.is_grouped:
            entry.query_stride = entry.kv_stride = (group + 2) * size
            entry.key_at, entry.value_at = group * size, (group + 1) * size
        else:
            entry.query_stride, entry.kv_stride = group * size, size
            entry.key_at = attention.num_heads * size
            entry.value_at = entry.key_at + kv_heads * size
        entry.scale, entry.softcap, entry.window = attention.scale, attention.softcap, attention.window
        if attention.rotary is not None:
            entry.cos, entry.sin = (self._at("float *", t) for t in (attention.rotary.cos, attention.rotary.sin))
            entry.rotary_size = 2 * attention.rotary.cos.shape[-1]
            entry.is_neighbours = attention.rotary.is_neighbours

    def _mlp(self, entry: Any, mlp: FusedMLP) -> None:
        gate = mlp.up if mlp.is_fused else mlp.gate
        entry.has_gate = 2 if mlp.is_fused else int(gate is not None)
        if gate is not None:
            self.projection(entry.gate, gate)
        self.projection(entry.up, mlp.up)
        self.projection(entry.down, mlp.down)
        entry.act = int(mlp.act)

    def _mixture(self, mixture: FusedMixture) -> Any:
        entry = self.found.ffi.new("zq_mixture *")
        all_mlps = [*mixture.experts, *(() if mixture.shared is None else (mixture.shared,))]
        experts = self.found.ffi.new("zq_mlp[]", len(all_mlps))
        self.structs.extend((entry, experts))
        for at, mlp in zip(experts, all_mlps):
            self._mlp(at, mlp)
        self.projection(entry.router, mixture.router)
        if mixture.shared_gate is not None:
            self.projection(entry.shared_gate, mixture.shared_gate)
        entry.experts, entry.num_experts, entry.top_k = experts, mixture.router.weight.shape[0], mixture.top_k
        entry.first, entry.num_held = mixture.first, len(mixture.experts)
        entry.factor, entry.is_renormalized = mixture.factor, mixture.is_renormalized
        entry.has_shared = mixture.shared is not None
        return entry

    def _at(self, kind: str, tensor: Tensor | None) -> Any:
        if tensor is None:
            return self.found.ffi.NULL
        whole = tensor if tensor._base is None else tensor._base  # a parameter may get other memory, its views do not
        if id(whole) not in self.known:
            self.known.add(id(whole))
            self.tensors.append(whole)
        return self.found.ffi.cast(kind, tensor.data_ptr())
