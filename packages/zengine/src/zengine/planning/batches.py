"""Input batches for planning: from a user's factory, token ids, or a shape."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zengine.planning.models import NotAFactory, factory

__all__ = ["Batch", "from_factory", "inputs", "token_ids"]

Batch = Callable[[int], Any]  # size of a micro-batch -> the model's argument


def token_ids(length: int) -> Batch:
    """Return batches of `length` token ids: (micro-batch, length) int64."""

    def make(micro_batch: int) -> Tensor:
        return torch.zeros(micro_batch, length, dtype=torch.long)

    return make


def inputs(text: str, dtype: torch.dtype) -> Batch:
    """Return batches of a shape, "3x224x224" or "512": (micro-batch, *shape) of `dtype`.  Raises ValueError
    otherwise.
    """
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)*", text):
        raise ValueError(f'"{text}" is no shape of one sample; write 3x224x224 or 512')
    shape = tuple(map(int, text.split("x")))

    def make(micro_batch: int) -> Tensor:
        return torch.zeros(micro_batch, *shape, dtype=dtype)

    return make


def from_factory(name: str) -> Batch:
    """Return batches of `module:factory`, called with the micro-batch size.  Raises NotAFactory if it cannot."""
    make = factory(name)
    try:
        inspect.signature(make).bind(1)
    except TypeError:
        raise NotAFactory(
            f'"{name}" takes no argument; it must take the size of a micro-batch and return what the model takes'
        ) from None
    except ValueError:  # a builtin without a signature
        pass
    return make
