"""`deepspeed.runtime.data_pipeline.data_routing.helper`: random-LTD without rewriting the model.

Here the engine finds the layers by `data_efficiency.data_routing.random_ltd` and puts hooks on them, so a model needs
no conversion before, and its weights have their own names after.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["convert_to_random_ltd", "save_without_random_ltd"]


def convert_to_random_ltd(model: nn.Module, convert_type: type | None = None) -> nn.Module:
    """`model` as it is: `initialize` does the rest, by the config."""
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """The weights, whose names were never changed."""
    return model.state_dict()
