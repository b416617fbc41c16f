"""Operators of a decoder, row by row: linear layers, norms and activations, with gradients.

Norms are reductions over one row; torch computes each row by itself, if there are two or more.

Activations: torch runs whole vectors by one code and the last elements of a thread's part by another, which may round
otherwise.  So tensors are cut where every part is made of whole vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from zengine.inference.exact.products import Products, pad_rows
from zengine.inference.structure import Norm, Unary

__all__ = ["activate", "by_rows", "linear", "normalize", "normalize_with"]

_VECTORS = 64  # elements: twice the longest vector, which is what torch's loops take at once
_GRAIN = 32768  # elements for each thread, at least, in most loops of torch
_SERIAL = 16384  # elements that one thread takes in all loops; that of GELU shares all more among all threads


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias over a multiple of 16 rows.  The gradient of x has the same property."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, products: Products) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.products, ctx.has_bias = products, bias is not None
        return products.of_rows(x, weight.t(), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        of_x = ctx.products.of_rows(grad, weight) if ctx.needs_input_grad[0] else None
        of_weight = grad.t() @ x if ctx.needs_input_grad[1] else None
        of_bias = grad.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias, None


def linear(products: Products, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias: (..., out).

    x: (..., in); weight: (out, in) of any strides; bias: (out,).
    """
    return by_rows(x, lambda rows: _Linear.apply(rows, weight, bias, products))  # type: ignore[no-untyped-call]


def by_rows(x: Tensor, multiply: Callable[[Tensor], Tensor]) -> Tensor:
    """Return (..., out): `multiply` of the rows of x, (..., in), contiguous and a multiple of 16."""
    rows = x.reshape(-1, x.shape[-1])
    out = multiply(pad_rows(rows).contiguous())
    return out[: rows.shape[0]].view(*x.shape[:-1], out.shape[-1])


def normalize(norm: Norm, x: Tensor) -> Tensor:
    """Return what `norm` computes: in float32, rounded once to the dtype of x."""
    return normalize_with(norm, x, norm.weight, norm.bias)


def normalize_with(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Return what `norm` computes with another weight and bias, (dim,)."""
    rows = x.reshape(-1, x.shape[-1])
    padded, size = pad_rows(rows), (x.shape[-1],)
    wide = padded.to(torch.promote_types(x.dtype, torch.float32))
    weight, bias = (None if each is None else each.to(wide.dtype) for each in (weight, bias))
    if weight is not None and norm.offset:
        weight = weight + norm.offset
    if norm.is_centered:
        out = F.layer_norm(wide, size, weight, bias, norm.eps)
    else:
        out = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        out = out if weight is None else out * weight
        out = out if bias is None else out + bias
    return out.to(x.dtype)[: rows.shape[0]].view(x.shape)


def activate(act: Unary, x: Tensor) -> Tensor:
    """Return act(x); an element's result does not depend on where it stands."""
    flat = x.reshape(-1)
    padded = pad_rows(flat, _VECTORS)
    parts = list(torch.split(padded, _parts(padded.numel(), torch.get_num_threads())))
    out = act(parts[0]) if len(parts) == 1 else torch.cat([act(part) for part in parts])
    return out[: flat.numel()].view(x.shape)


def _parts(count: int, num_threads: int) -> list[int]:
    """Cut `count` elements, a multiple of 64, into parts that threads share in multiples of 64 each."""
    sizes = []
    while count:
        sizes.append(_largest(count, num_threads))
        count -= sizes[-1]
    return sizes


def _largest(count: int, num_threads: int) -> int:
    """Return the most elements, up to `count`, that `num_threads` or as many as have work share so."""
    if num_threads == 1 or count <= _SERIAL:
        return count
    for sharing in range(min(num_threads, -(-count // _GRAIN)), 0, -1):
        unit = _VECTORS * math.lcm(num_threads, sharing)
        size = count // unit * unit
        if size and min(num_threads, -(-size // _GRAIN)) == sharing:
            return size
    return _SERIAL
