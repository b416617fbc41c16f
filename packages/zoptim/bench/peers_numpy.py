"""The rules in optimized numpy: in place, with two persistent buffers, one call per operation and tensor.

numpy has no bf16; 16-bit gradients and weights are passed as integers.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
from arena import Arena
from contenders import BETAS, DECAY, EPS, LOSS_SCALE, LR, MAX_NORM, MOMENTUM, Contender, Step, Unavailable
from torch import Tensor

__all__ = ["numpy_boundary", "numpy_fp32", "numpy_offload"]

BF16 = torch.bfloat16

Array = Any  # numpy.ndarray; numpy is optional


@attrs.frozen(eq=False)
class Rows:
    """One tensor's arrays: float32 of one length each; x and y are scratch."""

    np: Any  # the module
    p: Array
    g: Array
    s: Sequence[Array]  # moments
    x: Array
    y: Array


def _adamw(rows: Rows, count: int) -> None:
    np, p, (m, v), x = rows.np, rows.p, rows.s, rows.x
    _moments(rows)
    np.sqrt(v, out=x)
    x /= math.sqrt(1 - BETAS[1] ** count)
    x += EPS
    np.divide(m, x, out=x)
    x *= LR / (1 - BETAS[0] ** count)
    p *= 1 - LR * DECAY
    p -= x


def _moments(rows: Rows) -> None:
    np, g, (m, v), x = rows.np, rows.g, rows.s, rows.x
    np.multiply(g, 1 - BETAS[0], out=x)
    m *= BETAS[0]
    m += x
    np.multiply(g, g, out=x)
    x *= 1 - BETAS[1]
    v *= BETAS[1]
    v += x


def _lamb(rows: Rows, count: int) -> None:
    np, p, (m, v), x, y = rows.np, rows.p, rows.s, rows.x, rows.y
    _moments(rows)
    np.sqrt(v, out=x)
    x /= math.sqrt(1 - BETAS[1] ** count)
    x += EPS
    np.divide(m, x, out=x)
    x /= 1 - BETAS[0] ** count
    np.multiply(p, DECAY, out=y)
    x += y
    weight, direction = math.sqrt(float(np.dot(p, p))), math.sqrt(float(np.dot(x, x)))
    x *= LR * min(weight / direction, 10.0)
    p -= x


def _lion(rows: Rows, count: int) -> None:
    np, p, g, (m,), x, y = rows.np, rows.p, rows.g, rows.s, rows.x, rows.y
    np.multiply(m, BETAS[0], out=x)
    np.multiply(g, 1 - BETAS[0], out=y)
    x += y
    np.sign(x, out=x)
    x *= LR
    p *= 1 - LR * DECAY
    p -= x
    np.multiply(g, 1 - BETAS[1], out=y)
    m *= BETAS[1]
    m += y


def _adagrad(rows: Rows, count: int) -> None:
    np, p, g, (s,), x, y = rows.np, rows.p, rows.g, rows.s, rows.x, rows.y
    np.multiply(p, DECAY, out=x)
    x += g
    np.multiply(x, x, out=y)
    s += y
    np.sqrt(s, out=y)
    y += EPS
    x /= y
    x *= LR
    p -= x


def _sgd(rows: Rows, count: int) -> None:
    np, p, g, (b,), x = rows.np, rows.p, rows.g, rows.s, rows.x
    np.multiply(p, DECAY, out=x)
    x += g
    b *= MOMENTUM
    b += x
    np.multiply(b, LR, out=x)
    p -= x


_RULES: dict[str, tuple[Callable[[Rows, int], None], tuple[str, ...]]] = {
    "adamw": (_adamw, ("exp_avg", "exp_avg_sq")),
    "lamb": (_lamb, ("exp_avg", "exp_avg_sq")),
    "lion": (_lion, ("exp_avg",)),
    "adagrad": (_adagrad, ("sum",)),
    "sgd": (_sgd, ("momentum_buffer",)),
}


def _rows(rule: str, arena: Arena, weights: str, grads: str) -> list[Rows]:
    try:
        np = importlib.import_module("numpy")
    except ImportError as error:
        raise Unavailable("numpy is not installed") from error
    x, y = np.empty((2, max(arena.numels)), np.float32)
    moments = [arena.get(name) for name in _RULES[rule][1]]
    streams = zip(arena.get(weights), arena.get(grads), *moments)
    return [Rows(np, p.numpy(), g.numpy(), [s.numpy() for s in states], x[: len(p)], y[: len(p)])
            for p, g, *states in streams]  # fmt: skip


def numpy_fp32(rule: str) -> Contender:
    """float32 in, float32 out."""

    def prepare(arena: Arena) -> Step:
        update, rows, count = _RULES[rule][0], _rows(rule, arena, "weight", "grad"), 0

        def step() -> None:
            nonlocal count
            count += 1
            for row in rows:
                update(row, count)

        return step

    return Contender("numpy", prepare)


@attrs.frozen(eq=False)
class _Halves:
    """The 16-bit sides of a tensor, as integers."""

    given: Array  # uint16: bf16 gradients
    out: Array  # uint16: bf16 weights

    def widen(self, row: Rows) -> None:
        """float32 gradients."""
        bits = row.g.view(row.np.uint32)
        row.np.copyto(bits, self.given)
        row.np.left_shift(bits, 16, out=bits)

    def narrow(self, row: Rows) -> None:
        """bf16 weights, rounded to nearest even."""
        np = row.np
        bits, x = row.p.view(np.uint32), row.x.view(np.uint32)
        np.right_shift(bits, 16, out=x)
        x &= 1
        x += 0x7FFF
        x += bits
        x >>= 16
        np.copyto(self.out, x, casting="unsafe")


def _halves(arena: Arena, rows: list[Rows]) -> list[_Halves]:
    def integers(tensors: list[Tensor]) -> list[Array]:
        return [t.view(torch.int16).numpy().view(rows[0].np.uint16) for t in tensors]

    return list(map(_Halves, integers(arena.get("grad", BF16)), integers(arena.get("weight", BF16))))


def numpy_offload(is_boundary: bool = False) -> Contender:
    """AdamW from bf16 gradients to bf16 weights; the whole boundary also measures and divides."""

    def prepare(arena: Arena) -> Step:
        rows, count = _rows("adamw", arena, "master", "grad_float32"), 0
        halves = _halves(arena, rows)

        def step() -> None:
            nonlocal count
            count += 1
            for row, half in zip(rows, halves):
                half.widen(row)
            if is_boundary and not _unscale(rows):
                return
            for row, half in zip(rows, halves):
                _adamw(row, count)
                half.narrow(row)

        return step

    return Contender("numpy", prepare)


def _unscale(rows: list[Rows]) -> bool:
    """Divide by the loss scale and clip; return False if a gradient is not finite."""
    norm = math.sqrt(sum(float(row.np.dot(row.g, row.g)) for row in rows))
    factor = 1 / (LOSS_SCALE * max(1.0, (norm / LOSS_SCALE + 1e-6) / MAX_NORM))
    for row in rows:
        row.np.multiply(row.g, factor, out=row.g)
    return math.isfinite(norm)


def numpy_boundary() -> Contender:
    """See numpy_offload."""
    return numpy_offload(is_boundary=True)
