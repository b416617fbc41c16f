"""The rule of 1-bit LAMB as pure functions, see onebit.py."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

from zoptim.rules.onebit import Mean, variance_floor

__all__ = ["OneBitLambMoments", "OneBitLambPolicy", "momentum_scales", "onebit_lamb_rule"]


@attrs.frozen(eq=False, kw_only=True)
class OneBitLambMoments:
    """The state of 1-bit LAMB for one tensor: moments of its shape, and numbers."""

    step: int = 0  # calls so far
    exp_avg: Tensor  # running mean of the gradient
    exp_avg_sq: Tensor  # running mean of its square, frozen after the warm-up
    exp_avg_sq_fresh: Tensor  # the same, continued after the freeze from gradients that momenta imply
    coefficient: float = 0.0  # running mean of the trust ratio in the warm-up
    factor: float = 1.0  # of the last compressed step
    scale: float = 0.0  # momenta are multiplied by it before they are sent; 0: not known yet

    @classmethod
    def zeros(cls, param: Tensor) -> OneBitLambMoments:
        """Return the state before the first update of `param`."""
        zero = torch.zeros_like(param)
        return cls(exp_avg=zero, exp_avg_sq=zero, exp_avg_sq_fresh=zero)


@attrs.frozen(kw_only=True)
class OneBitLambPolicy:
    """Bounds of 1-bit LAMB's factors (Li et al. 2021, section 5)."""

    max_coeff: float = 10.0  # of the trust ratio in the warm-up
    min_coeff: float = 0.01
    coeff_beta: float = 0.9  # weight of the past in its running mean
    factor_max: float = 4.0  # of the ratio of frozen to fresh second moments
    factor_min: float = 0.5
    factor_threshold: float = 0.1  # largest relative change of the factor in one step

    def ratio(self, weight_norm: float, update_norm: float) -> float:
        """Return the trust ratio of a tensor; 1 if a norm is 0."""
        if not weight_norm or not update_norm:
            return 1.0
        return min(max(weight_norm / update_norm, self.min_coeff), self.max_coeff)

    def mean_coefficient(self, before: float, ratio: float) -> float:
        """Return the running mean after a warm-up step; a ratio of 1 does not count, as in DeepSpeed."""
        return before if ratio == 1.0 else self.coeff_beta * before + (1 - self.coeff_beta) * ratio

    def bounded(self, factor: float, last: float) -> float:
        """Return a factor within its bounds, and near the last one."""
        factor = min(max(factor, self.factor_min), self.factor_max)
        return min(max(factor, last * (1 - self.factor_threshold)), last * (1 + self.factor_threshold))


def momentum_scales(rms: Sequence[float]) -> list[float]:
    """Return the factors that give all momenta one root mean square, their mean; 1 for a momentum of 0."""
    united = sum(rms) / len(rms) if rms else 0.0
    return [united / each if each else 1.0 for each in rms]


def onebit_lamb_rule(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[OneBitLambMoments],
    policy: OneBitLambPolicy,
    *,
    mean: Mean,
    freeze_step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[list[Tensor], list[OneBitLambMoments]]:
    """1-bit LAMB (Li et al. 2021, algorithm 1): return the new parameters and moments.

    grads: as for `onebit_adam_rule`.  `mean` has one scale for all tensors, whose momenta are scaled to one size.
    """
    step = 1 + max((each.step for each in moments), default=0)
    if step == 1:
        return list(params), [attrs.evolve(each, step=step) for each in moments]
    beta1, beta2 = betas
    rates = _Rates(lr=lr, betas=betas, eps=eps, decay=weight_decay, freezes=step == freeze_step)
    momenta = [beta1 * each.exp_avg + (1 - beta1) * grad for each, grad in zip(moments, grads)]
    if step <= freeze_step:
        found = [
            _warm_step(p, m, beta2 * each.exp_avg_sq + (1 - beta2) * g * g, each, policy, rates)
            for p, m, g, each in zip(params, momenta, grads, moments)
        ]
    else:
        scales = [each.scale for each in moments]
        if not all(scales):
            scales = momentum_scales([float(each.exp_avg.double().square().mean().sqrt()) for each in moments])
        means = mean([momentum * scale for momentum, scale in zip(momenta, scales)])
        momenta = [value / scale for value, scale in zip(means, scales)]
        found = [
            _compressed_step(p, m, attrs.evolve(each, scale=s), policy, rates)
            for p, m, s, each in zip(params, momenta, scales, moments)
        ]
    return [new for new, _ in found], [attrs.evolve(after, step=step) for _, after in found]


@attrs.frozen(kw_only=True)
class _Rates:
    """Options of one step."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    freezes: bool  # it is the last step of the warm-up


def _warm_step(
    param: Tensor,
    momentum: Tensor,
    squares: Tensor,
    moments: OneBitLambMoments,
    policy: OneBitLambPolicy,
    rates: _Rates,
) -> tuple[Tensor, OneBitLambMoments]:
    update = momentum / (squares.sqrt() + rates.eps) + rates.decay * param
    ratio = policy.ratio(float(param.double().norm()), float(update.double().norm()))
    if rates.freezes:
        squares = squares.clamp(min=variance_floor(squares))
    after = attrs.evolve(
        moments,
        exp_avg=momentum,
        exp_avg_sq=squares,
        exp_avg_sq_fresh=squares if rates.freezes else moments.exp_avg_sq_fresh,
        coefficient=policy.mean_coefficient(moments.coefficient, ratio),
    )
    return param - rates.lr * ratio * update, after


def _compressed_step(
    param: Tensor, momentum: Tensor, moments: OneBitLambMoments, policy: OneBitLambPolicy, rates: _Rates
) -> tuple[Tensor, OneBitLambMoments]:
    (beta1, beta2), eps, decay = rates.betas, rates.eps, rates.decay
    implied = (momentum - beta1 * moments.exp_avg) / (1 - beta1)
    fresh = beta2 * moments.exp_avg_sq_fresh + (1 - beta2) * implied * implied
    roots = moments.exp_avg_sq.sqrt() + eps
    direction = momentum / roots
    update = direction + decay * param
    factor = float((roots / (fresh.sqrt() + eps)).max()) if param.numel() else 1.0
    if decay:
        size = float(update.double().norm())
        share = min(1.0, float(direction.double().norm()) / size) if size else 1.0
        factor = factor * share + 1.0 - share
    factor = policy.bounded(factor, moments.factor)
    after = attrs.evolve(moments, exp_avg=momentum, exp_avg_sq_fresh=fresh, factor=factor)
    return param - rates.lr * moments.coefficient * factor * update, after
