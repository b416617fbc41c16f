"""Split backward: gradients of a stage's input first, gradients of its weights later.

The weight gradient of a linear layer is a matrix product that nothing else waits for, and about a third of a training
step.  Inside `DeferWeightGrads`, `torch.nn.functional.linear` on a parameter records the two factors in backward
instead of multiplying them; `finish` multiplies, and passes the result to the parameter through autograd, so that
everything that depends on its gradient (accumulation, ZeRO's buckets) sees it as usual.

A layer that recomputes parts of itself in backward (torch.utils.checkpoint) must find the same operations as in
forward, since checkpoints compare saved tensors.  So `backward` runs inside `DeferWeightGrads(deferred, again=True)`,
which defers the weights that forward deferred, and no others: a user function that differentiates a product inside
its own backward needs the gradient immediately.

All other gradients (norms, biases, embeddings, convolutions) are small or rare and are computed with the input's.
Under autocast nothing is deferred, since the factors' dtypes differ from the weights'; nor is the weight of a layer
whose input needs no gradient.  The weight itself is no part of the graph, since autograd would call the hooks of a
parameter that gets no gradient.

Rejected: two calls of torch.autograd.grad, one for inputs and one for weights: the second call walks the stage's
graph again, so the bubble that it fills is the one it creates.
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
class DeferredWeightGrads:
    """Weight gradients of one micro-batch at one stage that are still to be computed."""

    factors: list[tuple[Tensor, Tensor, Tensor]] = attrs.field(factory=list)  # (weight, output gradient, input)
    weights: set[int] = attrs.field(factory=set)  # by id: those deferred in forward

    def add(self, weight: Tensor, gradient: Tensor, value: Tensor) -> None:
        """Record one product."""
        self.factors.append((weight, gradient, value))

    def backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Run torch.autograd.backward on outputs that were computed inside `DeferWeightGrads(self)`."""
        with DeferWeightGrads(self, again=True):
            _compat.run_backward(outputs, gradients)

    def finish(self) -> None:
        """Compute the products and let autograd accumulate them, in the order of a whole backward."""
        factors, self.factors = self.factors, []
        for weight, gradient, value in factors:
            product = gradient.reshape(-1, gradient.shape[-1]).t() @ value.reshape(-1, value.shape[-1])
            torch.autograd.backward([weight], [product])


@final
class DeferWeightGrads(TorchFunctionMode):
    """Defer the weight gradients of linear layers called inside to `deferred`.

    again: only those of weights that were deferred in forward; for use around a backward.
    """

    def __init__(self, deferred: DeferredWeightGrads, *, again: bool = False) -> None:
        super().__init__()
        self.deferred = deferred
        self.known = deferred.weights if again else None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func is functional.linear and not given and self._can_defer(*args):
            bias = args[2] if len(args) > 2 else None
            add = partial(self.deferred.add, args[1])
            self.deferred.weights.add(id(args[1]))
            return _Linear.apply(args[0], args[1].detach(), bias, add)  # type: ignore[no-untyped-call]
        return func(*args, **given)

    def _can_defer(self, value: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
        is_leaf = weight.is_leaf and weight.requires_grad and value.requires_grad and torch.is_grad_enabled()
        if self.known is not None and id(weight) not in self.known:
            return False
        return is_leaf and value.dtype == weight.dtype and not torch.is_autocast_enabled(value.device.type)


class _Linear(torch.autograd.Function):
    """y = x W^T + b, whose backward defers the gradient of W."""

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
