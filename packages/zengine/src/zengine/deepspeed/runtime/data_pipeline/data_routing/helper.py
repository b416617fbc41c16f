"""`deepspeed.runtime.data_pipeline.data_routing.helper`: random-LTD without rewriting the model.

The engine registers hooks on the layers that `data_efficiency.data_routing.random_ltd` names, so a model needs no
conversion, and its weights keep their names.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["convert_to_random_ltd", "save_without_random_ltd"]


def convert_to_random_ltd(model: nn.Module, convert_type: type | None = None) -> nn.Module:
    """Return `model` unchanged: `initialize` applies random-LTD from the config."""
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the state dict; its names never change."""
    return model.state_dict()
