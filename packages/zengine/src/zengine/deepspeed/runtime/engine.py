"""`deepspeed.runtime.engine`: the engine, the names of its timers, and gradients by dtype."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, final

from torch import Tensor

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed_engine import DeepSpeedEngine

__all__ = ["DeepSpeedEngine", "EngineTimers", "split_half_float_double_sparse"]

MEMORY_OPT_ALLREDUCE_SIZE = 500_000_000
_PHASES = ("fwd", "bwd", "bwd_inner", "bwd_allreduce", "step")


@final
class EngineTimers:
    """Names of the timers of a step's phases: of a micro-step ("fwd_microstep", ...), of a whole step ("fwd", ...).

    `forward_timers`, `backward_timers`, `backward_inner_timers`, `backward_reduce_timers` and `step_timers` have the
    names of one phase.
    """

    def __init__(self, enable_micro_timers: bool, enable_global_timers: bool) -> None:
        self.micro_timers = [f"{phase}_microstep" for phase in _PHASES] if enable_micro_timers else []
        self.global_timers = list(_PHASES) if enable_global_timers else []
        by_phase = [
            [name for name in self.active_timers() if name.removesuffix("_microstep") == phase] for phase in _PHASES
        ]
        self.forward_timers, self.backward_timers, self.backward_inner_timers = by_phase[:3]
        self.backward_reduce_timers, self.step_timers = by_phase[3:]

    def active_timers(self) -> list[str]:
        """Return the names of all timers."""
        return self.micro_timers + self.global_timers


def split_half_float_double_sparse(
    tensors: Iterable[Any],
) -> tuple[list[tuple[Any, list[Any]]], list[tuple[Any, list[Any]]]]:
    """Return (sparse tensors, dense tensors), each as pairs of a dtype and the tensors of that dtype.

    Sparse are torch's sparse tensors and DeepSpeed's SparseTensor.

    Raises AssertionError (DeepSpeed's) for a dtype that the accelerator does not support.
    """
    supported, given = get_accelerator().supported_dtypes(), list(tensors)
    for each in given:
        assert each.dtype in supported, f"attempting to reduce an unsupported grad type: {each.dtype}"
    buckets: tuple[list[tuple[Any, list[Any]]], list[tuple[Any, list[Any]]]] = ([], [])
    for dtype in supported:
        for bucket, wanted in zip(buckets, (True, False)):
            if found := [each for each in given if each.dtype == dtype and _is_sparse(each) == wanted]:
                bucket.append((dtype, found))
    return buckets


def _is_sparse(tensor: Any) -> bool:
    return not isinstance(tensor, Tensor) or tensor.is_sparse
