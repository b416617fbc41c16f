"""Gradient placeholder: `.grad` of a parameter whose gradient is stored elsewhere.

Problem.  After a backward a partition keeps gradients where no parameter shows them: sharded, in a wider dtype, on
the host, or multiplied by a loss scale.  With `.grad` None, torch's `clip_grad_norm_` and loops that skip parameters
without a gradient would silently do nothing.

Design.  `.grad` is then a tensor of the parameter's shape without memory; every operation on it raises an error that
names the parameter and the place of its gradient.  It lasts from the end of a backward to the next, or to the end of
the step; `.grad is None` keeps its meaning, "no gradient".

Rejected.  A property on a subclass of Parameter (it changes the class of the user's parameters); patching torch's
functions (it misses the user's own loops).
"""

from __future__ import annotations

from typing import Any, NoReturn, final

import torch
from torch import Tensor
from torch.nn import Parameter

from zpartition import _compat

__all__ = ["ADDED", "GradPlaceholder", "HiddenGradientError"]


class HiddenGradientError(RuntimeError):
    """`.grad` of a partitioned parameter was used where it does not show the gradient."""


@final
class GradPlaceholder(Tensor):
    """Tensor with the shape, dtype and device of a parameter; any operation on it raises HiddenGradientError."""

    owner: str  # name of the parameter
    reason: str  # why `.grad` cannot show the gradient

    __torch_function__ = _compat.NO_TORCH_FUNCTION  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, param: Parameter, owner: str, reason: str) -> GradPlaceholder:
        made: GradPlaceholder = Tensor._make_wrapper_subclass(
            cls, param.shape, dtype=param.dtype, device=param.device, layout=param.layout
        )
        made.owner, made.reason = owner, reason
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        found = next(each for each in _flat((*args, *(kwargs or {}).values())) if isinstance(each, cls))
        raise HiddenGradientError(ADDED if func is torch.ops.aten.add_.Tensor else found.explanation)

    @property
    def explanation(self) -> str:
        return (
            f'the gradient of {self.owner} is not in .grad: it is {self.reason}. To clip, set "gradient_clipping" in '
            "the config (engine.get_global_grad_norm() returns the norm after the step); to read it, call "
            "safe_get_full_grad(parameter) on every rank"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradPlaceholder({self.owner}, {self.reason})"


def _flat(values: Any) -> Any:
    """Yield an operation's arguments, with lists flattened."""
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from value
        else:
            yield value


ADDED = (
    "a backward outside micro_step() after the gradients of this step were reduced would mix local and reduced "
    "values. Call zero_grad() first, run every backward of the step inside micro_step() (engine.backward), or freeze "
    "these parameters while another model trains through them"
)
