"""Runners of the module's forward; `assemble` chooses.

| runner | adds |
|---|---|
| `Sequential` | nothing: the identity |
| `CastingRunner` | casts floating inputs to the weights' dtype (fp16.auto_cast) |
| `AutocastRunner` | torch.autocast |
| `ExplainingRunner` | names of wide buffers in errors about dtypes |
| `RunnerWithCleanup` | changes of the module to undo at the end: hooks of float32 modules, 8-bit layers |

A runner covers only forward.  Backward runs outside autocast, as torch recommends: each operation's gradient has the
dtype that its forward chose.  A caller's own autocast around the engine's forward stays in effect if the config does
not set one.

Changes of the module end with their runner, closed or not: the module may get another engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol, final

import attrs
import torch
from torch import nn

import zprecision

__all__ = [
    "AutocastRunner",
    "CastingRunner",
    "Closable",
    "ExplainingRunner",
    "Runner",
    "RunnerWithCleanup",
    "Sequential",
]


class Closable(Protocol):
    """Change of a module that can be undone."""

    def close(self) -> None: ...


class Runner(Protocol):
    """Runs one forward of the module."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def close(self) -> None:
        """Undo the changes of the module."""


@final
class Sequential:
    """Identity: calls the module."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module(*args, **kwargs)

    def close(self) -> None:
        """Do nothing."""


@final
@attrs.frozen
class CastingRunner:
    """Casts floating inputs to the parameters' dtype first (fp16.auto_cast)."""

    precision: zprecision.Precision

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.precision.cast_inputs(args, kwargs)
        return module(*args, **kwargs)

    def close(self) -> None:
        """Do nothing."""


@final
@attrs.frozen
class AutocastRunner:
    """Runs forward under torch.autocast, bit for bit like a plain loop that does."""

    device_type: str
    dtype: torch.dtype

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return module(*args, **kwargs)

    def close(self) -> None:
        """Do nothing."""


@final
@attrs.frozen(eq=False)
class ExplainingRunner:
    """Wraps a runner and names the wide buffers of the model in its errors about dtypes."""

    inner: Runner
    wide: zprecision.WideBuffers
    _undo: Any = attrs.field(init=False)  # a finalizer

    @_undo.default
    def _on_exit(self) -> Any:
        return weakref.finalize(self, self.wide.close)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.wide.explain_errors():
            return self.inner.forward(module, args, kwargs)

    def close(self) -> None:
        """Remove the hooks, and close `inner`."""
        self._undo()
        self.inner.close()


@final
@attrs.frozen(eq=False)
class RunnerWithCleanup:
    """Wraps a runner and undoes changes of the module when the engine closes."""

    inner: Runner
    changes: tuple[Closable, ...]
    _undo: Any = attrs.field(init=False)  # a finalizer

    @_undo.default
    def _on_exit(self) -> Any:
        return weakref.finalize(self, _close_all, self.changes)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner.forward(module, args, kwargs)

    def close(self) -> None:
        """Undo the changes, and then close `inner`."""
        with ExitStack() as stack:
            stack.callback(self.inner.close)
            stack.callback(self._undo)


def _close_all(changes: Sequence[Closable]) -> None:
    """Close `changes`, the last one first."""
    with ExitStack() as stack:
        for change in changes:
            stack.callback(change.close)
