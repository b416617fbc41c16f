"""`deepspeed.runtime.bf16_optimizer`."""

from __future__ import annotations

from torch import Tensor

from zengine.deepspeed.runtime.base_optimizer import ZeROOptimizer

__all__ = ["BF16_Optimizer"]


class BF16_Optimizer(ZeROOptimizer):  # noqa: N801 - DeepSpeed's name
    """Optimizer of an engine in bf16 at stage 1 with float32 accumulators by the config."""

    __slots__ = ()

    @property
    def bf16_groups(self) -> list[list[Tensor]]:
        """The module's trained parameters, by parameter group."""
        return [list(group) for group in self.fp16_groups]

    @property
    def fp32_groups_flat_partition(self) -> list[Tensor]:
        """`fp32_groups_flat`."""
        return self.fp32_groups_flat
