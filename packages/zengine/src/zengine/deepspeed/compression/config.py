"""`deepspeed.compression.config`: the section as nested dicts with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from zengine.compression.select import read_section
from zengine.config.keys.compression import CompressionTraining

__all__ = ["get_compression_config", "get_compression_section"]


def get_compression_section(compression_config: Mapping[str, Any]) -> CompressionTraining:
    """Return the settings of the section's members.  Raises ConfigError."""
    return read_section({"compression_training": dict(compression_config)})


def get_compression_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `compression_training` of a config, with defaults.  Raises ConfigError."""
    found: dict[str, Any] = _plain(get_compression_section(param_dict.get("compression_training") or {}))
    return found


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return {field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value))}
    if isinstance(value, Mapping):
        return {name: _plain(member) for name, member in value.items()}
    return [_plain(member) for member in value] if isinstance(value, tuple) else value
