"""Runners of the module's forward; `assemble` chooses.

| runner | adds |
|---|---|
| `Sequential` | nothing: the identity |
| `CastingRunner` | casts floating inputs to the weights' dtype (fp16.auto_cast) |
| `AutocastRunner` | torch.autocast |
| `ExplainingRunner` | names of wide buffers in errors about dtypes |
| `InputDtypeRunner` | inputs of another dtype in errors about dtypes, and what to do |
| `RunnerWithCleanup` | changes of the module to undo at the end: hooks of float32 modules, 8-bit layers |

A runner covers only forward.  Backward runs outside autocast, as torch recommends: each operation's gradient has the
dtype that its forward chose.  A caller's own autocast around the engine's forward stays in effect if the config does
not set one.

Changes of the module end with their runner, closed or not: the module may get another engine.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
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
    "InputDtypeRunner",
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
@attrs.frozen
class InputDtypeRunner:
    """Wraps a runner of a narrow model that casts no inputs: errors about dtypes name the inputs that are wider.

    As in DeepSpeed, only fp16.auto_cast and autocast cast inputs.
    """

    inner: Runner
    param: torch.dtype  # of the model's weights

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return self.inner.forward(module, args, kwargs)
        except RuntimeError as error:
            wide = list(
                _other_dtypes({**{f"argument {i}": each for i, each in enumerate(args)}, **kwargs}, self.param)
            )
            if ("dtype" not in str(error) and "scalar type" not in str(error)) or not wide:
                raise
            narrow = str(self.param)
            key = '"fp16": {"auto_cast": true}' if self.param == torch.float16 else f'"torch_autocast": {_AUTOCAST}'
            explained = RuntimeError(
                f"{error}. The model computes in {narrow}, and forward() got {', '.join(wide[:5])}. Cast floating "
                f"inputs in the loop (x.to({narrow})), or let the engine do it: {key} in the config."
            )
            for note in getattr(error, "__notes__", ()):  # of wide buffers, too
                explained.add_note(note)
            raise explained from error

    def close(self) -> None:
        """Close `inner`."""
        self.inner.close()


_AUTOCAST = '{"enabled": true, "dtype": "bfloat16"} without the section "bf16"'


def _other_dtypes(value: Any, param: torch.dtype, name: str = "") -> Iterator[str]:
    """Yield the floating tensors of another dtype in nested tuples, lists and dicts, with their places."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point() and value.dtype != param:
            yield f"{name} in {value.dtype!s}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _other_dtypes(each, param, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _other_dtypes(each, param, f"{name}[{index}]")


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
