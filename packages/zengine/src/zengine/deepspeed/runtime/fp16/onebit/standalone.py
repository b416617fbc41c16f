"""Use without an engine of the optimizers in this folder.

An engine that receives one connects it to its own ranks and buckets.  Alone, on several ranks, it communicates over
the default group with DeepSpeed's layout, in which padding counts in the divisors of scales, so its numbers are
DeepSpeed's; and `enable_backward_allreduce` of the object that it was given says whether gradients are to be reduced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import Tensor

import zcomm
import zoptim

__all__ = ["DeepSpeedArguments"]


class DeepSpeedArguments:
    """Base that gives one of zoptim's optimizers, which follows it in the bases, DeepSpeed's arguments."""

    deepspeed: Any = None  # the caller's object
    param_groups: list[dict[str, Any]]

    def __init__(
        self, params: Any, deepspeed: Any = None, lr: float = 1e-3, *, max_grad_norm: float = 0.0, **options: Any
    ) -> None:
        """Make it, connected to the ranks of the default group.

        deepspeed: an object whose `enable_backward_allreduce` follows what the next step takes; None with an engine
        of zengine, which reads it from the optimizer.
        Raises ValueError for another max_grad_norm than 0, which DeepSpeed's classes ignore.
        """
        if max_grad_norm:
            raise ValueError(
                f"{type(self).__name__}(max_grad_norm={max_grad_norm}): the engine clips; set gradient_clipping in "
                "the config."
            )
        super().__init__(params, lr, **options)  # type: ignore[call-arg]
        self.deepspeed = deepspeed
        _connect_to_world(self)

    def step(self, closure: Any = None, grads: Any = None) -> Any:
        """Update every parameter.  Raises ValueError for `grads`: put gradients into `.grad`."""
        if grads is not None:
            raise ValueError(
                f"{type(self).__name__}.step(grads=...) is not supported: put gradients into .grad of the parameters."
            )
        loss = super().step(closure)  # type: ignore[misc]
        _tell_engine(self, self.deepspeed)
        return loss


def _connect_to_world(optimizer: Any) -> None:
    """Connect `optimizer` to the ranks of the default group."""
    size = zcomm.group_size()
    if size == 1:
        return
    groups = [group for group in optimizer.param_groups if not group.get("non_freeze")]
    params = [param for group in groups for param in group["params"]]
    numels = [param.numel() for param in params]
    layout = (
        zcomm.SignLayout.packed(numels, size, fused=True)
        if optimizer.fuses_message
        else zcomm.SignLayout.by_tensor(numels, size, padded=True)
    )
    reduce = zcomm.CompressedAllReduce(layout, device=params[0].device if params else "cpu")

    def exact_mean(tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            zcomm.all_reduce(tensor)
            tensor.div_(size)

    optimizer.connect(
        zoptim.WholeTensors(reduce.mean, world_size=size, exact_mean=exact_mean, rank_tensors=_Errors(reduce))
    )


@final
class _Errors(Mapping[str, Tensor]):
    """Errors of a reduction, which are valid until its next call: each look-up asks for them."""

    def __init__(self, reduce: zcomm.CompressedAllReduce) -> None:
        self._reduce = reduce

    def __getitem__(self, key: str) -> Tensor:
        if key not in ("worker_error", "server_error"):
            raise KeyError(key)
        found: Tensor = getattr(self._reduce, key)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(("worker_error", "server_error"))

    def __len__(self) -> int:
        return 2


def _tell_engine(optimizer: Any, engine: Any) -> None:
    """Say on a caller's object whether the next step takes reduced gradients."""
    if engine is not None:
        engine.enable_backward_allreduce = not optimizer.needs_local_gradients
