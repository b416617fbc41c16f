"""`deepspeed.runtime.data_pipeline.data_routing.helper`: random-LTD without rewriting the model.

The engine registers hooks on the layers that `data_efficiency.data_routing.random_ltd` names, so a model needs no
conversion, and its weights keep their names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["convert_to_random_ltd", "remove_random_ltd_state_dict", "save_without_random_ltd"]


def convert_to_random_ltd(model: nn.Module, convert_type: type | None = None) -> nn.Module:
    """Return `model` unchanged: `initialize` applies random-LTD from the config."""
    return model


def save_without_random_ltd(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of the module, without the names of RandomLayerTokenDrop."""
    return remove_random_ltd_state_dict(getattr(model, "module", model).state_dict())


def remove_random_ltd_state_dict(state_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return the weights under the names that they have without RandomLayerTokenDrop."""
    return OrderedDict((name.replace(".random_ltd_layer", ""), value) for name, value in state_dict.items())
