"""`deepspeed.checkpoint.utils`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["clone_tensors_for_torch_save"]


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return a deep copy of dicts, lists and tuples with tensors on `device`, each in a storage of exactly its size.

    A weight is a view of a flat buffer, and torch.save writes whole buffers.  Tied tensors stay tied.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            own = value.detach()
            key = (
                (own.data_ptr(), own.shape, own.stride(), own.dtype, str(own.device)) if own.numel() else (id(value),)
            )
            if key not in copies:
                copies[key] = own.to(device, copy=True).contiguous()
            return copies[key]
        if isinstance(value, dict):
            copy = type(value)()
            copy.update({name: copied(each) for name, each in value.items()})
            return copy
        if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
            return type(value)(copied(each) for each in value)
        return value

    return copied(item)
