"""Mode of the layers of `deepspeed.module_inject`: inference, or training."""

from __future__ import annotations

import enum

__all__ = ["AUTOTP_MODE", "get_auto_tp_mode", "is_autotp_training_mode", "set_autotp_mode"]


class AUTOTP_MODE(enum.Enum):  # noqa: N801  DeepSpeed's name
    """Purpose of layers that are made."""

    TRAINING = "TRAINING"
    INFERENCE = "INFERENCE"  # their weights are frozen


_mode = AUTOTP_MODE.INFERENCE


def set_autotp_mode(training: bool = False) -> None:
    """Set the purpose of the layers that are made from now on."""
    globals()["_mode"] = AUTOTP_MODE.TRAINING if training else AUTOTP_MODE.INFERENCE


def get_auto_tp_mode() -> AUTOTP_MODE:
    """Return the purpose."""
    return _mode


def is_autotp_training_mode() -> bool:
    """Return True if layers are made for training."""
    return _mode is AUTOTP_MODE.TRAINING
