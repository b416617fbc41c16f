"""`deepspeed.runtime.data_pipeline.data_routing.scheduler`: number of tokens that random-LTD layers process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

__all__ = ["BaseScheduler", "RandomLTDScheduler"]


class BaseScheduler:
    """Number of tokens by step; `state` has the keys of the section "random_ltd_schedule"."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def get_value(self, global_steps: int) -> int:
        """Return the tokens of a step.  Raises RuntimeError unless schedule_type is "fixed_linear"."""
        if self.state["schedule_type"] != "fixed_linear":
            raise RuntimeError(f"schedule_type is {self.state['schedule_type']!r}; only 'fixed_linear' is known")
        low, high, config = self.state["min_value"], self.state["max_value"], self.state["schedule_config"]
        tokens = math.floor(global_steps / config["require_steps"] * (high - low) + low)
        return int(min(tokens - tokens % config["seq_per_step"], high))


class RandomLTDScheduler(BaseScheduler):
    """Schedule of random-LTD for custom loops, with a count of the tokens that layers have processed."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """Take the section "random_ltd", with "global_batch_size" added.

        Raises ValueError if it enables "layer_token_lr_schedule".
        """
        super().__init__()
        if config.get("layer_token_lr_schedule", {}).get("enabled"):
            raise ValueError("layer_token_lr_schedule.enabled: a learning rate by layer tokens is not available")
        self.model_layer_num = config["total_layer_num"]
        self.random_ltd_layer_num = config["random_ltd_layer_num"]
        self.config_schedule = config["random_ltd_schedule"]
        self.global_batch_size = config["global_batch_size"]
        self.reset_to_init()

    def reset_to_init(self) -> None:
        """Return to the state before the first step."""
        if self.config_schedule is not None:
            names = ("min_value", "max_value", "schedule_config", "schedule_type")
            self.state.update({name: self.config_schedule[name] for name in names})
            self.state["current_value"] = self.config_schedule["min_value"]
        self.state.update(consumed_layer_tokens=0, current_steps=-1)

    def get_total_layer_tokens(self, train_iters: int) -> int:
        """Run the schedule for `train_iters` steps; return the layer tokens consumed."""
        for step in range(train_iters):
            self.update_seq(step)
        return int(self.state["consumed_layer_tokens"])

    def update_seq(self, global_steps: int) -> None:
        """Set the tokens of a step, and count those of all layers once per step."""
        if self.state["current_value"] < self.state["max_value"]:
            self.state["current_value"] = self.get_value(global_steps)
        if global_steps != self.state["current_steps"]:
            whole = self.state["max_value"] * (self.model_layer_num - self.random_ltd_layer_num)
            part = self.state["current_value"] * self.random_ltd_layer_num
            self.state["consumed_layer_tokens"] += self.global_batch_size * (part + whole)
            self.state["current_steps"] = global_steps

    def get_current_seq(self) -> int:
        """Return the tokens that the layers process now."""
        return int(self.state["current_value"])

    def set_current_seq(self, seq_length: int) -> None:
        """Set the tokens that the layers process."""
        self.state["current_value"] = seq_length

    def get_random_ltd_layer_num(self) -> int:
        """Return the number of random-LTD layers."""
        return int(self.random_ltd_layer_num)

    def get_state(self) -> dict[str, Any]:
        """Return the whole state."""
        return self.state

    def set_state(self, state: dict[str, Any]) -> None:
        """Replace the whole state."""
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the state that a checkpoint holds."""
        names = ("consumed_layer_tokens", "current_steps", "current_value", "min_value", "max_value")
        return {name: self.state[name] for name in names}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore it."""
        self.state.update({name: state_dict[name] for name in self.state_dict()})
