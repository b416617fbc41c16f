"""`deepspeed.OnDevice`: builds a model with another default dtype and device (usually "meta")."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from typing import Any, final

import torch

__all__ = ["OnDevice"]


@final
class OnDevice(AbstractContextManager["OnDevice"]):
    """Sets the default dtype and device inside the block.  enabled: False makes the block do nothing."""

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self._dtype, self._device, self._enabled = dtype, torch.device(device), enabled
        self._undo = ExitStack()

    def __enter__(self) -> OnDevice:
        if self._enabled:
            self._undo.enter_context(self._device)
            self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self._dtype)
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()
