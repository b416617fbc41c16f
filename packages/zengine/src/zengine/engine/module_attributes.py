"""Attributes of the module, reached through the engine.

`engine.generate` is the module's attribute, unless the engine has one of that name.  Methods may read weights that
stage 3 has sharded, as `forward` may.  Names that the engine has are
those of nn.Module, the public members of `Engine`, and DeepSpeed's names (`DeepSpeedEngine`); everything else is
private.  Collisions are logged once, at the start.  Old names of the engine raise an error with the new one.
"""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["collisions", "lookup", "public_names", "warning_of_collisions"]

_NN_MODULE = frozenset({*dir(nn.Module), *vars(nn.Module())})
_HYBRID = ("rollout", "begin_rollout", "log_probs", "opened", "turns")  # if the section hybrid_engine is enabled
_RENAMED = {"world": "parts.world", "bench_done": "monitor.bench_done"}  # old names, of version 0.2


def lookup(engine: nn.Module, name: str) -> Any:
    """Return the submodule or parameter of `engine`, else the attribute of its module.

    Raises:
        AttributeError: neither has it.
    """
    try:
        return nn.Module.__getattr__(engine, name)
    except AttributeError:
        if name == "module":
            raise
    try:
        value = getattr(engine.module, name)
    except AttributeError as error:
        if name in _RENAMED:
            raise AttributeError(f"engine.{name} was renamed in 0.3.0; use engine.{_RENAMED[name]}.") from None
        hint = '; write "hybrid_engine": {"enabled": true} in the config for it' if name in _HYBRID else ""
        raise AttributeError(
            f"neither the engine nor its module ({type(engine.module).__name__}) has an attribute {name!r}{hint}"
        ) from error
    if isinstance(value, types.MethodType) and value.__self__ is engine.module:
        parts: Any = engine.parts
        return parts.partition.method(value)
    return value


def public_names(engine: nn.Module) -> frozenset[str]:
    """Return the names of `engine` that hide attributes of its module, except those of nn.Module."""
    kinds = type(engine).__mro__[: type(engine).__mro__.index(nn.Module)]
    names = {*vars(engine), *engine._modules}.union(*map(vars, kinds))
    return frozenset(name for name in names if not name.startswith("_") and name not in _NN_MODULE)


def collisions(engine: nn.Module) -> list[str]:
    """Return the names that engine and module both have, sorted, without evaluating properties of the module.

    An attribute of the module that leads to the engine (`generate` of a hybrid engine) hides nothing.
    """
    module = engine.module
    assert isinstance(module, nn.Module)
    names = {*vars(module), *module._modules, *module._parameters, *module._buffers}
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        names.update(vars(kind))
    led_here = {name for name, value in vars(module).items() if getattr(value, "engine", None) is engine}
    return sorted((public_names(engine) & names) - led_here)


def warning_of_collisions(engine: nn.Module) -> str:
    """Return the warning about collisions; "" if there are none."""
    if not (names := collisions(engine)):
        return ""
    ways = ", ".join(f"engine.module.{name}" for name in names)
    return (
        f"attributes of {type(engine.module).__name__} are hidden by attributes of the engine: "
        f"{', '.join(names)}. Use {ways}"
    )
