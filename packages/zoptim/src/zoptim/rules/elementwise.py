"""The update rules as pure functions: the definition that every kernel is measured against.

A rule takes tensors of any floating dtype and returns new tensors of that dtype; nothing is
written in place and nothing is remembered, so the same call in float64 is the oracle for the
float32 kernel, and the text of a rule can be read beside its paper.  A rule knows no loss scale:
the caller divides the gradient first, which is what a kernel's `grad_scale` has to amount to.

Rejected: sharing code with the kernels.  An oracle that calls what it judges judges nothing.
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
    """What Adam remembers of one tensor.  All tensors have the parameter's shape and dtype."""

    step: int = 0  # updates applied so far
    exp_avg: Tensor  # running mean of the gradient
    exp_avg_sq: Tensor  # running mean of its square
    max_exp_avg_sq: Tensor | None = None  # running maximum of exp_avg_sq; present means AMSGrad

    @classmethod
    def zeros(cls, param: Tensor, *, amsgrad: bool = False) -> AdamMoments:
        """The memory before the first update of `param`."""
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
    """Adam with the decay taken off the weights directly (Loshchilov and Hutter 2019, algorithm 2).

    Returns the new parameter and the new moments.  AMSGrad is on when `moments` carries the maximum.
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
    """Stochastic gradient descent in torch's form: the first buffer is the gradient, undampened.

    `momentum_buffer` is None before the first update, and stays None without momentum.
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
    """Adagrad (Duchi et al. 2011) in torch's form, with L2 decay; `step` updates have been applied so far.

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
    weight_norm, direction_norm = float(param.double().norm()), float(direction.double().norm())
    return param - lr * trust_ratio(weight_norm, direction_norm, min_coeff, max_coeff) * direction, after


def trust_ratio(weight_norm: float, direction_norm: float, min_coeff: float, max_coeff: float) -> float:
    """Return what LAMB multiplies the step of a tensor by; 1 where a norm is zero."""
    if weight_norm > 0 and direction_norm > 0:
        return min(max(weight_norm / direction_norm, min_coeff), max_coeff)
    return 1.0


def lamb_direction(
    param: Tensor, grad: Tensor, moments: AdamMoments, options: Mapping[str, Any]
) -> tuple[Tensor, AdamMoments]:
    """LAMB's step before the trust ratio, of any part of a tensor; `options` by the names of `lamb_rule`."""
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
    """m-hat / (sqrt(v-hat) + eps), or / sqrt(v-hat + eps), and the moments that go with it."""
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
