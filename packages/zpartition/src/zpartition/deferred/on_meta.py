"""Models on the meta device, for those who ask only for their shapes: milliseconds and no memory at any size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


def on_meta(make: Callable[[], T]) -> T:
    """Return what `make` builds, with its tensors on the meta device.

    Code inside that insists on real tensors (it loads weights, say) still works, at its own cost.

    Raises:
        TypeError: `make` is a module, which has been built already.
    """
    if isinstance(make, nn.Module):
        kind = type(make).__name__
        raise TypeError(
            f"on_meta takes a function that builds the model, got a {kind}: on_meta(lambda: {kind}(...))."
        )
    with torch.device("meta"), _WithoutValues():
        return make()


class _WithoutValues(TorchFunctionMode):
    """Skips `normal_` of meta tensors: it changes nothing there, but imports torch's compiler (1 to 2 s)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func in (Tensor.normal_, nn.init.normal_):
            filled = args[0] if args else given["tensor"]
            if filled.is_meta:
                return filled
        return func(*args, **given)
