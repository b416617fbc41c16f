"""`deepspeed.compression.compress`: the verbs of compression, and how names are found."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from zengine.compression.clean import redundancy_clean
from zengine.compression.select import read_section
from zengine.compression.start import init_compression as _init_compression
from zengine.compression.teacher import copy_layers
from zengine.config.grammar.errors import ConfigError
from zengine.config.grammar.source import read
from zengine.deepspeed.compression.basic_layer import remember_layers
from zengine.deepspeed.compression.helper import get_module_name, is_module_compressible

__all__ = [
    "check_deepspeed_config",
    "get_module_name",
    "init_compression",
    "is_module_compressible",
    "redundancy_clean",
    "student_initialization",
]


def check_deepspeed_config(config: Any) -> dict[str, Any]:
    """Return a config, a path or a dict, as a dict.  Raises ConfigError for a file that cannot be read."""
    if isinstance(config, Mapping):
        return dict(config)
    document = read(config)
    if not isinstance(document.data, Mapping):
        raise ConfigError(document.source, document.problems)
    return copy.deepcopy(dict(document.data))


def init_compression(
    model: nn.Module, deepspeed_config: Any, teacher_model: nn.Module | None = None, mpu: Any = None
) -> nn.Module:
    """Prepare `model` for the techniques of the config; return it.  See `zengine.init_compression`."""
    prepared = _init_compression(model, deepspeed_config, teacher_model, mpu)
    remember_layers(prepared, mpu)
    return prepared


def student_initialization(student_model: nn.Module, teacher_model: nn.Module, deepspeed_config: Any) -> None:
    """Copy the layers that `layer_reduction` names from the teacher.  Raises ConfigError, ValueError."""
    copy_layers(student_model, teacher_model, read_section(deepspeed_config).layer_reduction)
