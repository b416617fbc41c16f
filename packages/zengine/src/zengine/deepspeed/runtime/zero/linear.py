"""`deepspeed.runtime.zero.linear`: torch's linear layer.

DeepSpeed's version keeps autograd from holding gathered weights.  Stage 3 saves weights by their address for every
function here (`memory_efficient_linear` has no effect), so torch's own needs no replacement.
"""

from __future__ import annotations

from typing import Any, final

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["LinearFunctionForZeroStage3", "LinearModuleForZeroStage3", "zero3_linear_wrap"]


def zero3_linear_wrap(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return torch.nn.functional.linear(input, weight, bias)."""
    return functional.linear(input, weight, bias)


@final
class LinearFunctionForZeroStage3:
    """The same, called by `apply`."""

    apply = staticmethod(zero3_linear_wrap)


class LinearModuleForZeroStage3(nn.Linear):
    """torch.nn.Linear."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(in_features, out_features, bias, **kwargs)
