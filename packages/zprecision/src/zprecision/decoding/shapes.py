"""Shapes of a decoder's tensors: C trusts what it is told, so every size is compared before it gets an address."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, float32, int8

from zprecision.backends.native import is_addressable
from zprecision.decoding.values import (
    FusedAttention,
    FusedBlock,
    FusedCache,
    FusedHead,
    FusedJoin,
    FusedMixture,
    FusedMLP,
    FusedNorm,
    FusedProjection,
    FusedSum,
)

__all__ = ["check_block", "check_head"]


def check_block(block: FusedBlock, width: int, capacity: int) -> None:
    """Raise ValueError if a tensor of a block does not fit the others, `width` or `capacity`."""
    found = _block(block, width, capacity)
    _raise(next(found, ""))


def check_head(head: FusedHead, width: int) -> None:
    """Raise ValueError if a tensor of a head does not fit `width`."""
    rows = head.projection.weight.shape[0]
    found = [*_norm("last norm", head.norm, (width,)), *_projection("head", head.projection, rows, width)]
    _raise(next(iter(found), ""))


def _raise(problem: str) -> None:
    if problem:
        raise ValueError(f"the tensors of this decoder do not fit: {problem}")


def _block(block: FusedBlock, width: int, capacity: int) -> Iterator[str]:
    yield from _attention(block.attention, width, capacity, own_rows=_own_rows(block.out_ranks))
    if isinstance(block.mlp, FusedMixture):
        yield from _mixture(block.mlp, width, is_shared_out=block.down_ranks is not None)
    else:
        yield from _mlp("", block.mlp, width, own_rows=_own_rows(block.down_ranks))
    for name in ("norm", "out_norm", "mlp_norm", "mlp_out_norm"):
        yield from _norm(name, getattr(block, name), (width,))
    yield from _cache(block.cache, block.attention, capacity)


def _own_rows(ranks: FusedSum | FusedJoin | None) -> bool:
    """Return whether a last projection has some of the rows, and reads what all ranks give."""
    return isinstance(ranks, FusedJoin)


def _attention(attention: FusedAttention, width: int, capacity: int, *, own_rows: bool) -> Iterator[str]:
    heads, kv_heads, size = attention.num_heads, attention.num_kv_heads, attention.head_size
    if min(heads, kv_heads, size) < 1 or heads % kv_heads:
        yield f"{heads} heads of {size} over {kv_heads} key heads: these must divide the heads"
    rows = [heads * size, kv_heads * size, kv_heads * size]
    count = len(attention.projections)
    if count not in (1, 3) or (attention.is_grouped and count != 1):
        yield f"{count} projections of queries, keys and values: pass three, or one of all"
    for projection, each in zip(attention.projections, rows if count == 3 else [sum(rows)]):
        yield from _projection("queries, keys and values", projection, each, width)
    if own_rows:
        yield from _projection("output projection", attention.out, *attention.out.weight.shape)
    else:
        yield from _projection("output projection", attention.out, width, heads * size)
    yield from _norm("query norm", attention.query_norm, (size, heads * size))
    yield from _norm("key norm", attention.key_norm, (size, kv_heads * size))
    if attention.rotary is not None:
        half = attention.rotary.cos.shape[-1]
        if 2 * half > size:
            yield f"tables rotate {2 * half} features of heads that have {size}"
        for name, table in (("cosines", attention.rotary.cos), ("sines", attention.rotary.sin)):
            if table.dim() != 2 or table.shape[0] < capacity or table.shape[1] != half:
                yield f"{name} are {tuple(table.shape)} and must be ({capacity}, {half})"
            yield from _memory(name, table)


def _mlp(owner: str, mlp: FusedMLP, width: int, *, own_rows: bool = False) -> Iterator[str]:
    grown = mlp.down.weight.shape[-1]
    if own_rows:
        yield from _projection(f"{owner}down projection", mlp.down, *mlp.down.weight.shape)
        grown = mlp.up.weight.shape[0] // (2 if mlp.is_fused else 1)
    else:
        yield from _projection(f"{owner}down projection", mlp.down, width, grown)
    yield from _projection(f"{owner}up projection", mlp.up, 2 * grown if mlp.is_fused else grown, width)
    if mlp.gate is not None:
        yield from _projection(f"{owner}gate", mlp.gate, grown, width)


def _mixture(mixture: FusedMixture, width: int, *, is_shared_out: bool) -> Iterator[str]:
    """is_shared_out: other ranks hold other experts."""
    experts, number = mixture.experts, mixture.router.weight.shape[0]
    if not 1 <= mixture.top_k <= number:
        yield f"{mixture.top_k} of {number} experts are chosen for a token"
    if not experts or mixture.first < 0 or mixture.first + len(experts) > number:
        yield f"{len(experts)} experts from number {mixture.first} on are held, and the router has {number}"
    if len(experts) != number and not is_shared_out:
        yield f"{len(experts)} of {number} experts are held, and no ranks add up what they compute"
    yield from _projection("router", mixture.router, number, width)
    for index, expert in enumerate(experts):
        if _form(expert) != _form(experts[0]):
            yield f"expert {index} has another form, or reads other kinds of weights, than expert 0"
        yield from _mlp(f"expert {index}: ", expert, width)
    if mixture.shared is not None:
        yield from _mlp("shared expert: ", mixture.shared, width)
    if mixture.shared_gate is not None:
        yield from _projection("gate of the shared expert", mixture.shared_gate, 1, width)
        if mixture.shared is None:
            yield "there is a gate of a shared expert, and no shared expert"


def _form(mlp: FusedMLP) -> tuple[object, ...]:
    """Return what experts of a mixture have in common."""
    reads_codes = any(not isinstance(each.weight, Tensor) for each in (mlp.up, mlp.gate) if each is not None)
    return mlp.down.weight.shape[-1], mlp.is_fused, mlp.gate is None, reads_codes


def _projection(name: str, projection: FusedProjection, rows: int, columns: int) -> Iterator[str]:
    shape, bias = tuple(projection.weight.shape), projection.bias
    if shape != (rows, columns):
        yield f"{name}: its weight is {shape} and must be {(rows, columns)}"
    if bias is not None and tuple(bias.shape) != (rows,):
        yield f"{name}: its bias is {tuple(bias.shape)} and must be {(rows,)}"


def _norm(name: str, norm: FusedNorm | None, sizes: tuple[int, ...]) -> Iterator[str]:
    if norm is None:
        return
    if norm.size not in sizes:
        yield f"{name}: its size is {norm.size} and must be {' or '.join(map(str, sizes))}"
    for vector in (norm.weight, norm.bias):
        if vector is not None and vector.numel() != norm.size:
            yield f"{name}: its vector is {tuple(vector.shape)} and must be {(norm.size,)}"


def _cache(cache: FusedCache, attention: FusedAttention, capacity: int) -> Iterator[str]:
    shape = (cache.keys.shape[0], attention.num_kv_heads, capacity, attention.head_size)
    for name, part in (("keys", cache.keys), ("values", cache.values)):
        if tuple(part.shape) != shape or part.dtype != cache.keys.dtype:
            yield f"{name} are {part.dtype} of {tuple(part.shape)} and must be {cache.keys.dtype} of {shape}"
        yield from _memory(name, part, part.dtype)
    if cache.keys.dtype != int8:
        return
    for name, scales in (("scales of keys", cache.key_scales), ("scales of values", cache.value_scales)):
        if scales is None or tuple(scales.shape) != shape[:-1]:
            yield f"{name} are {None if scales is None else tuple(scales.shape)} and must be {shape[:-1]}"
        else:
            yield from _memory(name, scales)


def _memory(name: str, tensor: Tensor, dtype: object = float32) -> Iterator[str]:
    if not is_addressable(tensor) or not tensor.is_contiguous() or tensor.dtype != dtype:
        yield f"{name} are {tensor.dtype} on {tensor.device} and must be contiguous {dtype} on the CPU"
