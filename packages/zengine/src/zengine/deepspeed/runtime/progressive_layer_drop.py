"""`deepspeed.runtime.progressive_layer_drop`: the law of theta, for loops without an engine."""

from __future__ import annotations

from typing import Any

from zengine.features.layer_drop import KEYWORD, theta_at

__all__ = ["ProgressiveLayerDrop"]


class ProgressiveLayerDrop:
    """Theta, which falls from 1 to `theta` at the rate `gamma` a step; an engine computes it by itself."""

    def __init__(self, theta: float = 0.5, gamma: float = 0.001) -> None:
        self.theta = theta
        self.gamma = gamma
        self.current_theta = 1.0

    def get_state(self) -> dict[str, Any]:
        """Return the keywords for forward of a model that skips its layers."""
        return {"progressive_layer_drop": True, KEYWORD: self.get_theta()}

    def get_theta(self) -> float:
        """Return theta of the last `update_state`; 1.0 before."""
        return self.current_theta

    def update_state(self, global_step: int) -> None:
        """Compute theta after `global_step` steps."""
        self.current_theta = theta_at(global_step, self.theta, self.gamma)
