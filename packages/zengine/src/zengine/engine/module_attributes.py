"""Attributes of the module, reached through the engine.

An engine answers for its module: `engine.generate` is the module's.  Names that both have are the engine's.  These
are the names of nn.Module, the public members of `Engine`, and DeepSpeed's names (`DeepSpeedEngine`), nothing else;
everything further is kept under private names.  A collision is logged once, at the start.
"""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["collisions", "lookup", "public_names", "warning_of_collisions"]


def lookup(engine: nn.Module, name: str) -> Any:
    """Return what nn.Module registered on `engine` under `name`, else the module's attribute.

    Raises:
        AttributeError: neither has it.
    """
    try:
        return nn.Module.__getattr__(engine, name)
    except AttributeError:
        if name == "module":
            raise
    try:
        return getattr(engine.module, name)
    except AttributeError as error:
        raise AttributeError(
            f"neither the engine nor its module ({type(engine.module).__name__}) has an attribute {name!r}"
        ) from error


def public_names(engine: nn.Module) -> frozenset[str]:
    """Names of `engine` that hide attributes of its module: those of nn.Module are not among them."""
    kinds = type(engine).__mro__[: type(engine).__mro__.index(nn.Module)]
    names = {*vars(engine), *engine._modules}.union(*map(vars, kinds))
    return frozenset(name for name in names if not name.startswith("_") and name not in _NN_MODULE)


def collisions(engine: nn.Module) -> list[str]:
    """Names that the engine and its module both have, sorted; no property of the module is evaluated."""
    module = engine.module
    assert isinstance(module, nn.Module)
    names = {*vars(module), *module._modules, *module._parameters, *module._buffers}
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        names.update(vars(kind))
    return sorted(public_names(engine) & names)


def warning_of_collisions(engine: nn.Module) -> str:
    """Return the log line about them; "" where there are none."""
    if not (names := collisions(engine)):
        return ""
    ways = ", ".join(f"engine.module.{name}" for name in names)
    return (
        f"{type(engine.module).__name__} has attributes that the engine's own of the same name hide: "
        f"{', '.join(names)}. Reach the module's as {ways}"
    )


_NN_MODULE = frozenset({*dir(nn.Module), *vars(nn.Module())})
