"""What users look up on an engine about precision, with the names that DeepSpeed scripts use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from zengine.trainable import dtype_of

if TYPE_CHECKING:
    from zengine.config import Plan

__all__ = ["PrecisionFacts"]


class PrecisionFacts:
    """Read-only answers from the plan; mixed into `Engine`."""

    if TYPE_CHECKING:
        plan: Plan
        module: nn.Module

    def fp16_enabled(self) -> bool:
        """Whether parameters are float16."""
        return self.plan.precision.param == torch.float16

    def bfloat16_enabled(self) -> bool:
        """Whether parameters are bfloat16."""
        return self.plan.precision.param == torch.bfloat16

    def fp16_auto_cast(self) -> bool:
        """Whether floating inputs of forward become the parameters' dtype."""
        return self.plan.cast_inputs

    def fp16_master_weights_and_gradients(self) -> bool:
        """Whether the optimizer updates float16 weights themselves."""
        return self.plan.precision.master == torch.float16

    def bf16_master_weights_and_gradients(self) -> bool:
        """Whether the optimizer updates bfloat16 weights themselves."""
        return self.plan.precision.master == torch.bfloat16

    def bf16_optimizer_states(self) -> bool:
        """Whether optimizer states in bfloat16 were asked for beside such masters."""
        return self.plan.numerics.narrow_states

    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
        """(dtype of the parameters, dtype of the gradient accumulators)."""
        param = self.plan.precision.param or dtype_of(self.module)
        return param, self.plan.zero.accumulate_for(param)

    @property
    def communication_data_type(self) -> torch.dtype:
        """What most gradients travel in."""
        return self.plan.precision.reduce or dtype_of(self.module)

    def amp_enabled(self) -> bool:
        """Whether the config has an amp section that is on; it is carried out by torch.autocast."""
        return bool(self.plan.numerics.amp_level)

    def torch_autocast_enabled(self) -> bool:
        """Whether forward runs under torch.autocast."""
        return self.plan.numerics.autocast != torch.float32

    def torch_autocast_dtype(self) -> torch.dtype | None:
        """The lower dtype of torch.autocast; None without it."""
        return self.plan.numerics.autocast if self.torch_autocast_enabled() else None

    def torch_autocast_lower_precision_safe_modules(self) -> list[str]:
        """Classes whose parameters' gradients travel in the lower dtype."""
        return list(self.plan.zero.narrow_classes)
