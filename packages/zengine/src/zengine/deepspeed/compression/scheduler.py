"""`deepspeed.compression.scheduler`: the schedule, for loops that count steps without an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from zengine.compression.layers import StepCount
from zengine.compression.start import compression_of
from zengine.config.plan.techniques.compression import enabled_techniques
from zengine.deepspeed.compression.config import get_compression_section

__all__ = ["compression_scheduler"]


class compression_scheduler:  # noqa: N801
    """Counts steps of a model that `init_compression` has prepared; an engine does this by itself."""

    def __init__(self, model: nn.Module, compression_config: Mapping[str, Any]) -> None:
        found = compression_of(model)
        self.model = model
        self.compression_config = compression_config
        self.training_steps = 0
        self.count = StepCount() if found is None else found.count
        self.techniques = enabled_techniques(get_compression_section(compression_config))

    def step(self, step_zero_check: bool = False) -> None:
        """Count one step; `step_zero_check`: only switch on what begins at step 0."""
        self.training_steps += not step_zero_check
        self.count.steps = self.training_steps

    @property
    def weight_quantization_enabled(self) -> bool:
        """True once weights are rounded."""
        technique = self.techniques.get("weight_quantization")
        return technique is not None and self.count.steps >= technique.shared_parameters.schedule_offset
