"""`deepspeed.runtime.base_optimizer`: the class that other code tests an engine's optimizer against."""

from __future__ import annotations

from typing import NoReturn

from zengine.engine.optimizer_calls import is_redirected

__all__ = ["DeepSpeedOptimizer"]


class _OfEngines(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return is_redirected(instance)

    def __call__(cls) -> NoReturn:
        raise TypeError("an engine's optimizer is made by deepspeed.initialize(), from the caller's or the config's")


class DeepSpeedOptimizer(metaclass=_OfEngines):
    """Optimizers whose `step` is an engine's.  They keep their own class, and are instances of this one as well."""
