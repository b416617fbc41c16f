"""`generate` of a module around which an engine stands leads to the engine's.

Code that has the module alone (`engine.module.generate(...)`, a pipeline of Transformers) then decodes by the engine,
too.  The attribute is the instance's; the class is not changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, Protocol, final

from torch import nn

from zengine.inference.calls.transformers_style import own_generate

__all__ = ["ModuleGenerate", "own_generate_of"]


class Generator(Protocol):
    """An engine."""

    def generate(self, *args: Any, **kwargs: Any) -> Any: ...


@final
class ModuleGenerate:
    """`module.generate` while the module has an engine.  A copied or pickled module has its class's again."""

    def __init__(self, engine: Generator, module: nn.Module) -> None:
        self.engine, self.module = engine, module
        self.__wrapped__ = own_generate_of(module) or own_generate  # whose signature this has

    @classmethod
    def attach(cls, engine: Generator, module: nn.Module) -> None:
        """Let `module.generate` be the engine's, in place of its own or that of another engine."""
        module.__dict__["generate"] = cls(engine, module)

    @classmethod
    def detach(cls, engine: Generator, module: nn.Module) -> bool:
        """Give the module its own `generate` back, if it has that of `engine`; return whether it had."""
        held = module.__dict__.get("generate")
        if not isinstance(held, cls) or held.engine is not engine:
            return False
        del module.__dict__["generate"]
        if getattr(module, "generate", None) != held.__wrapped__ and held.__wrapped__ is not own_generate:
            module.__dict__["generate"] = held.__wrapped__
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.engine.generate(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        own = getattr(type(self.module), "generate", None)
        return (_without_generate, (type(self.module).__name__,)) if own is None else (partial, (own, self.module))


def own_generate_of(module: nn.Module) -> Callable[..., Any] | None:
    """Return the module's own `generate`, also if an engine has put its own in that place; None without one."""
    found: Callable[..., Any] | None = getattr(module, "generate", None)
    if not isinstance(found, ModuleGenerate):
        return found
    return None if found.__wrapped__ is own_generate else found.__wrapped__


def _without_generate(name: str) -> Callable[..., Any]:
    """Return what stands in the place of `generate` in a copy of a module that has none."""
    return partial(_raise_without_generate, name)


def _raise_without_generate(name: str, *args: Any, **kwargs: Any) -> NoReturn:
    raise AttributeError(f"{name} has no generate(): this is a copy of the module of a hybrid engine")
