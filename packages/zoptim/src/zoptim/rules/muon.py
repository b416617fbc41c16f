"""The rule of Muon as pure functions, see elementwise.py, and the Newton-Schulz iteration.

Unlike elementwise rules it accepts stacks of matrices of one shape, which share batched products.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["COEFFICIENTS", "momentum_rule", "muon_rule", "muon_scale", "orthogonalize"]

COEFFICIENTS = (3.4445, -4.775, 2.0315)  # Jordan et al. 2024: the steepest slope at 0 of a quintic


def orthogonalize(matrices: Tensor, steps: int = 5, method: str = "standard") -> Tensor:
    """Return matrices (..., rows, cols) with the same singular vectors and singular values near 1 (0.7 to 1.2).

    Newton-Schulz with the quintic of Jordan et al. 2024.  "gram" iterates on the smaller Gram matrix and multiplies
    by the matrix once at the end: fewer operations if one side is much longer.  In the matrix's null directions its
    factors grow to 3.4**steps, where bf16 noise would exceed the signal, so it runs in float32.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.mT if tall else matrices
    x = x.float() if method == "gram" and x.dtype in (torch.bfloat16, torch.float16) else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = COEFFICIENTS
    gram = x @ x.mT
    if method == "gram":
        eye = torch.eye(x.size(-2), dtype=x.dtype, device=x.device)
        total = eye.expand_as(gram)
        for _ in range(steps):
            factor = a * eye + b * gram + c * (gram @ gram)
            total = factor @ total
            gram = factor @ gram @ factor
        x = total @ x
    else:
        for step in range(steps):
            gram = x @ x.mT if step else gram
            x = a * x + (b * gram + c * (gram @ gram)) @ x
    result: Tensor = (x.mT if tall else x).to(matrices.dtype)
    return result


def muon_rule(
    param: Tensor,
    grad: Tensor,
    buffer: Tensor,
    *,
    lr: float = 1e-3,
    momentum: float = 0.95,
    weight_decay: float = 0.1,
    nesterov: bool = True,
    ns_steps: int = 5,
    ns_method: str = "standard",
    adjust_lr: str = "original",
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Muon on one matrix, or a stack of one shape: return the new weight and the new momentum.

    adjust_lr "original" scales by sqrt(max(1, rows / cols)) (Jordan et al. 2024), "match_rms_adamw" by
    0.2 * sqrt(max(rows, cols)) (Liu et al. 2025).
    """
    direction, buffer = momentum_rule(grad, buffer, momentum=momentum, nesterov=nesterov, maximize=maximize)
    update = orthogonalize(compute_format(direction), ns_steps, ns_method).to(param.dtype)
    scale = muon_scale(param.shape[-2], param.shape[-1], adjust_lr)
    return param * (1 - lr * weight_decay) - lr * scale * update, buffer


def momentum_rule(
    grad: Tensor, buffer: Tensor, *, momentum: float, nesterov: bool, maximize: bool
) -> tuple[Tensor, Tensor]:
    """Return the direction before it is orthogonalized, and the new momentum: the elementwise half of the rule."""
    grad = -grad if maximize else grad
    buffer = momentum * buffer + (1 - momentum) * grad
    return (1 - momentum) * grad + momentum * buffer if nesterov else buffer, buffer


def muon_scale(rows: int, cols: int, adjust_lr: str) -> float:
    """Return the factor of lr for a matrix of this shape."""
    return math.sqrt(max(1, rows / max(1, cols))) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, cols))


def compute_format(matrices: Tensor) -> Tensor:
    """Cast to the dtype of the iteration: bf16 on GPUs, unchanged (float32 or wider) elsewhere."""
    return matrices.bfloat16() if matrices.is_cuda else matrices
