"""The update rules as pure functions, the reference of the kernels.

A rule accepts tensors of any floating dtype and returns new tensors of that dtype; it writes nothing in place and
keeps no state, so the same call in float64 is the oracle of the float32 kernel, and the code can be compared with the
paper.  A rule has no loss scale: the caller divides the gradient first, and a kernel's `grad_scale` must be
equivalent.

Rejected: sharing code with the kernels; an oracle must be independent of the code under test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

__all__ = ["AdamMoments", "adagrad_rule", "adam_rule", "adamw_rule", "lamb_rule", "lion_rule", "sgd_rule"]


@attrs.frozen(eq=False, kw_only=True)
class AdamMoments:
    """The state of Adam for one tensor.  All tensors have the parameter's shape and dtype."""

    step: int = 0  # updates applied so far
    exp_avg: Tensor  # running mean of the gradient
    exp_avg_sq: Tensor  # running mean of its square
    max_exp_avg_sq: Tensor | None = None  # running maximum of exp_avg_sq, with AMSGrad

    @classmethod
    def zeros(cls, param: Tensor, *, amsgrad: bool = False) -> AdamMoments:
        """Return the state before the first update of `param`."""
        zero = torch.zeros_like(param)
        return cls(exp_avg=zero, exp_avg_sq=zero, max_exp_avg_sq=zero if amsgrad else None)


def adamw_rule(
    param: Tensor,
    grad: Tensor,
    moments: AdamMoments,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    bias_correction: bool = True,
) -> tuple[Tensor, AdamMoments]:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

    Returns the new parameter and the new moments.  AMSGrad applies if `moments` has the maximum.
    """
    direction, after = _adam_direction(-grad if maximize else grad, moments, betas, eps, bias_correction)
    return param * (1 - lr * weight_decay) - lr * direction, after


def adam_rule(
    param: Tensor,
    grad: Tensor,
    moments: AdamMoments,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
    bias_correction: bool = True,
) -> tuple[Tensor, AdamMoments]:
    """Adam with the decay added to the gradient, as an L2 penalty (Kingma and Ba 2015, algorithm 1)."""
    penalised = (-grad if maximize else grad) + weight_decay * param
    direction, after = _adam_direction(penalised, moments, betas, eps, bias_correction)
    return param - lr * direction, after


def sgd_rule(
    param: Tensor,
    grad: Tensor,
    momentum_buffer: Tensor | None,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Stochastic gradient descent as in torch: the first buffer is the undampened gradient.

    `momentum_buffer` is None before the first update, and always without momentum.
    """
    direction = (-grad if maximize else grad) + weight_decay * param
    if momentum == 0:
        return param - lr * direction, None
    buffer = direction  # the first buffer, see [Note: the first momentum] in sgd.py
    if momentum_buffer is not None:
        buffer = momentum * momentum_buffer + (1 - dampening) * direction
    return param - lr * (direction + momentum * buffer if nesterov else buffer), buffer


def adagrad_rule(
    param: Tensor,
    grad: Tensor,
    total: Tensor,
    *,
    step: int = 0,
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Adagrad (Duchi et al. 2011) as in torch, with L2 decay; `step` updates have been applied before.

    Returns the new parameter and the new sum of squares.
    """
    penalised = (-grad if maximize else grad) + weight_decay * param
    total = total + penalised * penalised
    return param - lr / (1 + step * lr_decay) * penalised / (total.sqrt() + eps), total


def lion_rule(
    param: Tensor,
    grad: Tensor,
    mean: Tensor,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Lion (Chen et al. 2023, algorithm 2): the sign of an interpolated gradient, and a slower mean of it."""
    beta1, beta2 = betas
    grad = -grad if maximize else grad
    mixed = beta1 * mean + (1 - beta1) * grad
    direction = torch.where(mixed.isnan(), mixed, mixed.sign())  # torch's sign of NaN is 0
    return param * (1 - lr * weight_decay) - lr * direction, beta2 * mean + (1 - beta2) * grad


def lamb_rule(
    param: Tensor,
    grad: Tensor,
    moments: AdamMoments,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    eps_inside_sqrt: bool = False,
    min_coeff: float = 0.01,
    max_coeff: float = 10.0,
    maximize: bool = False,
) -> tuple[Tensor, AdamMoments]:
    """LAMB (You et al. 2020, algorithm 2) with DeepSpeed's bounds of the trust ratio, on one whole tensor."""
    options = {
        "betas": betas,
        "eps": eps,
        "weight_decay": weight_decay,
        "bias_correction": bias_correction,
        "eps_inside_sqrt": eps_inside_sqrt,
        "maximize": maximize,
    }
    direction, after = lamb_direction(param, grad, moments, options)
    weight_norm, direction_norm = _norm(param), _norm(direction)
    return param - lr * trust_ratio(weight_norm, direction_norm, min_coeff, max_coeff) * direction, after


def _norm(tensor: Tensor) -> float:
    """Return the norm of a whole tensor; `float` of a DTensor's would be that of this rank's part."""
    norm = tensor.double().norm()
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def trust_ratio(weight_norm: float, direction_norm: float, min_coeff: float, max_coeff: float) -> float:
    """Return the factor of LAMB's step of a tensor; 1 if a norm is zero."""
    if weight_norm > 0 and direction_norm > 0:
        return min(max(weight_norm / direction_norm, min_coeff), max_coeff)
    return 1.0


def lamb_direction(
    param: Tensor, grad: Tensor, moments: AdamMoments, options: Mapping[str, Any]
) -> tuple[Tensor, AdamMoments]:
    """Return LAMB's direction, before the trust ratio, of any part of a tensor; `options` as for `lamb_rule`."""
    grad = -grad if options["maximize"] else grad
    names = ("betas", "eps", "bias_correction", "eps_inside_sqrt")
    direction, after = _adam_direction(grad, moments, *(options[name] for name in names))
    return direction + options["weight_decay"] * param, after


def _adam_direction(
    grad: Tensor,
    moments: AdamMoments,
    betas: tuple[float, float],
    eps: float,
    bias_correction: bool,
    eps_inside: bool = False,
) -> tuple[Tensor, AdamMoments]:
    """Return m-hat / (sqrt(v-hat) + eps), or m-hat / sqrt(v-hat + eps), and the new moments."""
    beta1, beta2 = betas
    step = moments.step + 1
    mean = beta1 * moments.exp_avg + (1 - beta1) * grad
    square = beta2 * moments.exp_avg_sq + (1 - beta2) * grad * grad
    largest = None if moments.max_exp_avg_sq is None else torch.maximum(moments.max_exp_avg_sq, square)
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0
    variance = (square if largest is None else largest) / correction2
    denominator = (variance + eps).sqrt() if eps_inside else variance.sqrt() + eps
    after = AdamMoments(step=step, exp_avg=mean, exp_avg_sq=square, max_exp_avg_sq=largest)
    return mean / correction1 / denominator, after
