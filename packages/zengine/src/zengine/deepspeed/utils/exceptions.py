"""`deepspeed.utils.exceptions`."""

from __future__ import annotations

__all__ = ["DeprecatedException"]


class DeprecatedException(Exception):
    """Use of an interface that was removed."""
