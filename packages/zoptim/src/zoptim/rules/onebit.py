"""The rules of 1-bit Adam as pure functions, see elementwise.py.

They update a list of tensors at once, because one message carries the momenta of all.  `mean` is the communication:
it returns the compressed mean over ranks of a list of tensors, and is the identity on one rank.

The laws are DeepSpeed's.  The first call only counts.  No moment is corrected for its bias, and the weight decay is
decoupled.  What differs: when second moments freeze they get a floor, `variance_floor`.  Signs say +1 or -1 also
where a momentum is 0; there DeepSpeed divides by eps alone, and weights jump by hundreds of thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch
from torch import Tensor

from zoptim.rules.elementwise import AdamMoments

__all__ = ["FLOOR_SHARE", "is_settled", "onebit_adam_rule", "variance_floor"]

Mean = Callable[[list[Tensor]], list[Tensor]]

FLOOR_SHARE = 0.01  # of the positive second moments of a tensor that the floor raises
FLOOR_OF_MEAN = 1 / 32
SETTLED = 0.96  # ratio of sums of second moments, 1 / (1 - beta2) steps apart (Tang et al. 2021, section 7.1)


def onebit_adam_rule(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    moments: Sequence[AdamMoments],
    *,
    mean: Mean,
    freeze_step: int,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[list[Tensor], list[AdamMoments]]:
    """1-bit Adam (Tang et al. 2021, algorithm 1): return the new parameters and moments.

    grads: means over ranks in the calls up to number `freeze_step`, this rank's own afterwards.  `AdamMoments.step`
    counts calls, the first included, which changes nothing else.
    """
    step = 1 + max((each.step for each in moments), default=0)
    if step == 1:
        return list(params), [attrs.evolve(each, step=step) for each in moments]
    is_frozen = step > freeze_step
    momenta = [betas[0] * each.exp_avg + (1 - betas[0]) * grad for each, grad in zip(moments, grads)]
    squares = [each.exp_avg_sq for each in moments]
    if is_frozen:
        momenta = mean(momenta)
    else:
        squares = [betas[1] * square + (1 - betas[1]) * grad * grad for square, grad in zip(squares, grads)]
    new = [
        param - lr * (momentum / (square.sqrt() + eps) + weight_decay * param)
        for param, momentum, square in zip(params, momenta, squares)
    ]
    if step == freeze_step:
        squares = [square.clamp(min=variance_floor(square)) for square in squares]
    return new, [AdamMoments(step=step, exp_avg=m, exp_avg_sq=v) for m, v in zip(momenta, squares)]


def variance_floor(exp_avg_sq: Tensor) -> float:
    """Return the smallest second moment that may divide a compressed momentum.

    It is a quantile of the positive ones (`FLOOR_SHARE` of them are smaller; of less than 1 / FLOOR_SHARE values none
    is), but at least `FLOOR_OF_MEAN` of their mean over the tensor: all elements of a compressed momentum have one
    size, so those of rare rows of an embedding would move many times as far as the others.  1 if none is positive:
    such a tensor has had no gradient, its scale is 0, and it stays where it is.  Synchronizes with the device.
    """
    positive = exp_avg_sq[exp_avg_sq > 0].flatten()
    if not positive.numel():
        return 1.0
    quantile = float(positive.kthvalue(1 + int(FLOOR_SHARE * positive.numel()))[0])
    return max(quantile, FLOOR_OF_MEAN * float(exp_avg_sq.double().mean()))


def is_settled(before: float, now: float) -> bool:
    """Return whether second moments have settled, by their sums 1 / (1 - beta2) steps apart: `freeze_step: "auto"`.

    Sums grow from 0 towards the gradient's variance; when they stop, the variance is known.
    """
    return before > 0 and SETTLED * max(before, now) <= min(before, now)


def rate_of(lr: float | Tensor) -> float:
    """Return a learning rate as a number."""
    return float(lr.item()) if isinstance(lr, torch.Tensor) else lr
