"""The rule of Adafactor as a pure function, see elementwise.py.

Shazeer and Stern 2018 replace the second moment of a matrix by the means of its rows and columns; their outer
product, divided by the mean of either, is the best rank-one estimate.  Where torch departs from the paper, the rule
follows torch: means for sums, eps1 in the denominators instead of in the squares, and lr as the bound of the relative
step.  Tensors of more than two dims are stacks of matrices in their last two.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

__all__ = ["AdafactorMoments", "adafactor_rule"]


@attrs.frozen(eq=False, kw_only=True)
class AdafactorMoments:
    """The state of Adafactor for one tensor: a row and a column, or one variance for a vector or a scalar."""

    step: int = 0  # updates applied so far
    row_var: Tensor | None = None  # (..., rows, 1), mean squares along each row
    col_var: Tensor | None = None  # (..., 1, cols), mean squares along each column
    variance: Tensor | None = None  # the parameter's shape; fewer than two dims only

    @classmethod
    def zeros(cls, param: Tensor) -> AdafactorMoments:
        """Return the state before the first update of `param`."""
        if param.dim() < 2:
            return cls(variance=torch.zeros_like(param))
        *stack, rows, cols = param.shape
        return cls(row_var=param.new_zeros(*stack, rows, 1), col_var=param.new_zeros(*stack, 1, cols))


def adafactor_rule(
    param: Tensor,
    grad: Tensor,
    moments: AdafactorMoments,
    *,
    lr: float = 1e-2,
    beta2_decay: float = -0.8,
    eps: tuple[float | None, float] = (None, 1e-3),
    d: float = 1.0,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> tuple[Tensor, AdafactorMoments]:
    """Adafactor without momentum (Shazeer and Stern 2018, algorithms 4 to 6): return the new parameter and moments.

    The step is relative to the root mean square of the weights, at least eps[1]; the root mean square of the update
    is clipped at `d`.  eps[0] None is the machine epsilon of the parameter's dtype.
    """
    grad = -grad if maximize else grad
    eps1 = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
    step = moments.step + 1
    after, variance = _estimate(grad * grad, moments, step, float(step**beta2_decay), eps1)
    update = grad / variance.clamp(min=eps1 * eps1).sqrt()
    update = update / max(1.0, _root_mean_square(update) / d)
    relative_step = min(lr, step**-0.5) * max(eps[1], _root_mean_square(param))
    return param * (1 - lr * weight_decay) - relative_step * update, after


def _estimate(
    square: Tensor, moments: AdafactorMoments, step: int, share: float, eps1: float
) -> tuple[AdafactorMoments, Tensor]:
    """Return the moments after `square`, with weight `share`, and their estimate of each element's variance."""

    def mix(old: Tensor, new: Tensor) -> Tensor:
        return (1 - share) * old + share * new

    if moments.variance is not None:
        variance = mix(moments.variance, square)
        return AdafactorMoments(step=step, variance=variance), variance
    assert moments.row_var is not None, "moments have a row and a column, or a variance"
    assert moments.col_var is not None, "moments have a row and a column, or a variance"
    row = mix(moments.row_var, square.mean(dim=-1, keepdim=True))
    column = mix(moments.col_var, square.mean(dim=-2, keepdim=True))
    after = AdafactorMoments(step=step, row_var=row, col_var=column)
    return after, row * column / row.mean(dim=-2, keepdim=True).clamp(min=eps1)


def _root_mean_square(tensor: Tensor) -> float:
    """Return the root mean square, computed in float64; 0 for an empty tensor."""
    return float(tensor.double().square().mean().sqrt()) if tensor.numel() else 0.0
