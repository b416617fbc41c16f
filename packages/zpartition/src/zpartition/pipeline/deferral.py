"""A backward in two halves: the gradient of a stage's input first, those of its weights when there is time.

The weight gradient of a linear layer is a matrix product that nobody else waits for, and about a third of a training
step.  While `WeightsLater` is entered, `torch.nn.functional.linear` on a parameter remembers its two factors instead
of multiplying them in backward; `finish` multiplies, and hands the result to the parameter through autograd, so that
whatever hangs on the parameter's gradient (accumulation, ZeRO's buckets) sees it as ever.

A layer that computes parts of itself again in backward (torch.utils.checkpoint) has to find what it found in forward,
since checkpoints compare what is saved.  So `backward` runs inside of `WeightsLater(later, again=True)`, which takes
weights that forward has taken, and no others: a function of the user's own that differentiates a product inside of
its backward wants the gradient there and then.

All other gradients (norms, biases, embeddings, convolutions) are small or rare and come at once, with the input's.
Under autocast nothing is deferred, since the factors would have other dtypes than the weights; nor is the weight of a
layer whose input needs no gradient.  The weight itself is no part of the graph, since autograd would call the hooks
of a parameter that gets nothing.

Rejected: two calls of torch.autograd.grad, one for inputs and one for weights: the second walks through the stage
again, and the bubble it fills is the one it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, final

import attrs
import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from zpartition import _compat


@final
@attrs.define(eq=False)
class LaterProducts:
    """Weight gradients of one micro-batch at one stage that are still to be multiplied."""

    factors: list[tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=list)  # (weight, output gradient, input)
    weights: set[int] = attrs.field(factory=set)  # by id: those that have waited in forward

    def add(self, weight: Tensor, gradient: Tensor, value: Tensor) -> None:
        """One product to come."""
        self.factors.append((weight, gradient, value))

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """As torch.autograd.backward, of what was computed inside `WeightsLater(self)`."""
        with WeightsLater(self, again=True):
            _compat.run_backward(outputs, gradients)

    def finish(self) -> None:
        """Multiply, and let autograd accumulate; in the order in which a whole backward would."""
        factors, self.factors = self.factors, []
        for weight, gradient, value in factors:
            product = gradient.reshape(-1, gradient.shape[-1]).t() @ value.reshape(-1, value.shape[-1])
            torch.autograd.backward([weight], [product])


@final
class WeightsLater(TorchFunctionMode):
    """Linear layers called inside put their weights' gradients into `later` when backward comes.

    again: only those of weights that did so in forward; around a backward.
    """

    def __init__(self, later: LaterProducts, *, again: bool = False) -> None:
        super().__init__()
        self.later = later
        self.known = later.weights if again else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.linear and not given and self._can_wait(*args):
            bias = args[2] if len(args) > 2 else None
            add = partial(self.later.add, args[1])
            self.later.weights.add(id(args[1]))
            return _Linear.apply(args[0], args[1].detach(), bias, add)  # type: ignore[no-untyped-call]
        return func(*args, **given)

    def _can_wait(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        is_leaf = weight.is_leaf and weight.requires_grad and value.requires_grad and torch.is_grad_enabled()
        if self.known is not None and id(weight) not in self.known:
            return False
        return is_leaf and value.dtype == weight.dtype and not torch.is_autocast_enabled(value.device.type)


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose backward leaves the gradient of W for later."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, add: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        ctx.save_for_backward(value, weight)
        ctx.add, ctx.has_bias = add, bias is not None
        return functional.linear(value, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (gradient,) = gradients
        value, weight = ctx.saved_tensors
        ctx.add(gradient, value)
        bias = gradient.reshape(-1, gradient.shape[-1]).sum(0) if ctx.has_bias else None
        return gradient @ weight, None, bias, None
