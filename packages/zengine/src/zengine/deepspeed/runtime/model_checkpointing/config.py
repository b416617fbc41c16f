"""`deepspeed.runtime.model_checkpointing.config`: the section `checkpoint` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zengine.deepspeed.runtime import constants as keys

__all__ = ["CHECKPOINT_DEFAULT_DICT", "get_checkpoint_config"]

CHECKPOINT_DEFAULT_DICT: dict[str, Any] = {
    keys.CHECKPOINT_TAG_VALIDATION: keys.CHECKPOINT_TAG_VALIDATION_DEFAULT.upper(),
    "checkpoint_serialization": True,
    "writer": None,
}


def get_checkpoint_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section's values about files, with DeepSpeed's defaults; `writer` as it was written.

    Raises AssertionError (DeepSpeed's) for another mode of the tags' comparison.
    """
    section = param_dict.get(keys.CHECKPOINT) or {}
    found = {name: section.get(name, default) for name, default in CHECKPOINT_DEFAULT_DICT.items()}
    mode = found[keys.CHECKPOINT_TAG_VALIDATION] = str(found[keys.CHECKPOINT_TAG_VALIDATION]).upper()
    allowed = keys.CHECKPOINT_TAG_VALIDATION_MODES
    assert mode in allowed, f"checkpoint.tag_validation is {mode}; it is one of {', '.join(allowed)}"
    return found
