"""How one forward of the module is carried out; `assemble` chooses.

| runner | what it adds |
|---|---|
| `Sequential` | nothing: the identity |
| `CastingRunner` | floating inputs become the weights' dtype first (fp16.auto_cast) |
| `AutocastRunner` | forward runs under torch.autocast |
| `ExplainingRunner` | errors about dtypes name the buffers that are wider than the weights |
| `Holding` | what was done to the module and is undone at the end: hooks around float32 modules, 8-bit layers |

A runner covers forward alone.  Backward runs outside autocast, as torch recommends: each operation's gradient has the
dtype that its forward chose.  An autocast of the caller's own around the engine's forward stays in effect where the
config says nothing of it.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Protocol, final

import attrs
import torch
from torch import nn

import zprecision

__all__ = ["AutocastRunner", "CastingRunner", "Closable", "ExplainingRunner", "Holding", "Runner", "Sequential"]


class Closable(Protocol):
    """Something that was done to a module and can be undone."""

    def close(self) -> None: ...


class Runner(Protocol):
    """Carries out one forward of the module."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def close(self) -> None:
        """Leave the module as it was found."""


@final
class Sequential:
    """The identity: call the module."""

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return module(*args, **kwargs)

    def close(self) -> None:
        """Nothing was done."""


@final
@attrs.frozen
class CastingRunner:
    """Casts floating inputs to the parameters' dtype first (fp16.auto_cast)."""

    precision: zprecision.Precision

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = self.precision.cast_inputs(args, kwargs)
        return module(*args, **kwargs)

    def close(self) -> None:
        """Nothing was done."""


@final
@attrs.frozen
class AutocastRunner:
    """Runs forward under torch.autocast: the same bits as in a loop that does so itself."""

    device_type: str
    dtype: torch.dtype

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.autocast(self.device_type, dtype=self.dtype):
            return module(*args, **kwargs)

    def close(self) -> None:
        """Nothing was done."""


@final
@attrs.frozen(eq=False)
class ExplainingRunner:
    """Another runner, whose errors about dtypes say which buffers of the model are wide."""

    inner: Runner
    wide: zprecision.WideBuffers

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.wide.explain_errors():
            return self.inner.forward(module, args, kwargs)

    def close(self) -> None:
        """Remove the hooks, and undo what `inner` did."""
        self.wide.close()
        self.inner.close()


@final
@attrs.frozen(eq=False)
class Holding:
    """Another runner, and what is undone when the engine closes."""

    inner: Runner
    held: tuple[Closable, ...]

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.inner.forward(module, args, kwargs)

    def close(self) -> None:
        """Undo all of it, and then what `inner` did."""
        with ExitStack() as stack:
            stack.callback(self.inner.close)
            for each in self.held:
                stack.callback(each.close)
