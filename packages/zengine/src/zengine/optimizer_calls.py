"""The optimizer that `initialize` returned, called in torch's way: `optimizer.step()` and `optimizer.zero_grad()`.

Problem.  The optimizer holds flat shards whose gradients exist inside the engine's step alone.  Its own `step`,
called by somebody with torch's habits (or by Lightning Fabric), would find no gradient and train nothing.

Design.  While the engine lives, two methods of that one optimizer lead to the engine: `step` is the engine's (with
its boundary, loss scale, clipping and publishing) but for the learning-rate schedule, which the caller steps himself,
and `zero_grad` drops what torch's would.  They are replaced on the instance, so the class, `isinstance`, state dicts,
copies and the wrappers that torch's schedules put around `step` stay what they are.  The engine's own calls pass
through `OwnStep`, which notes its thread (updates that run ahead have one), and reach the optimizer's real `step`.

With accumulation the caller may step after every micro-step or after the last one of a step alone; the clock tells
these two apart by the number of backwards, and refuses everything else.

Rejected.  Returning a wrapper (`isinstance(optimizer, AdamW)` and torch's schedules fail); changing the optimizer's
class (an instance's `step`, which torch's schedules write, hides it).
"""

from __future__ import annotations

import functools
import threading
import types
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor

from zengine.clock import Phase
from zengine.features import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine


class ScaledStep(Protocol):
    """An optimizer step that divides gradients by `grad_scale` while it updates."""

    grad_scale: Tensor | None

    def step(self) -> object: ...


@final
class OwnStep:
    """An optimizer step as the engine calls it: `grad_scale` and `step` of `scaled`.

    Invariant: `is_running` in a thread exactly while that thread is inside `step`.
    """

    def __init__(self, scaled: ScaledStep) -> None:
        self.scaled = scaled
        self._thread = threading.local()

    @property
    def grad_scale(self) -> Tensor | None:
        return self.scaled.grad_scale

    @grad_scale.setter
    def grad_scale(self, value: Tensor | None) -> None:
        self.scaled.grad_scale = value

    @property
    def is_running(self) -> bool:
        """Whether this thread is inside `step`."""
        return getattr(self._thread, "is_inside", False)

    def step(self) -> object:
        """The optimizer's real step."""
        self._thread.is_inside = True
        try:
            return self.scaled.step()
        finally:
            self._thread.is_inside = False


@final
class OptimizerCalls(Feature):
    """Leads `step` and `zero_grad` of the engine's optimizer to the engine; `close` gives the optimizer its own."""

    def __init__(self, own: OwnStep) -> None:
        self.own = own
        self.close_methods: Callable[[], None] = lambda: None

    def attach(self, engine: Engine) -> None:
        optimizer = engine.optimizer
        assert optimizer is not None
        replaced: dict[str, Any] = {
            name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)
        }
        step = functools.partial(_step, weakref.ref(engine), self.own)
        _replace(optimizer, "step", step)
        _replace(optimizer, "zero_grad", functools.partial(_zero_grad, weakref.ref(engine)))

        def give_back() -> None:
            for name in ("step", "zero_grad"):
                vars(optimizer).pop(name, None)
            vars(optimizer).update(replaced)

        self.close_methods = give_back

    def close(self) -> None:
        self.close_methods()


def _replace(optimizer: torch.optim.Optimizer, name: str, call: Callable[..., Any]) -> None:
    """Let `optimizer.name(...)` be `call(real, ...)`, where `real` is the method that was there.

    A bound method, since torch's schedules look for its function, and carry marks over to what they put around it.
    """
    real = getattr(optimizer, name)

    @functools.wraps(real)
    def method(_self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return call(real, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(method, optimizer))


def _step(
    ref: weakref.ref[Engine], own: OwnStep, real: Callable[..., Any], closure: Callable[[], Any] | None = None
) -> Any:
    """`optimizer.step(closure)`: the engine's step; returns the closure's value, or None without one."""
    if own.is_running:
        return real() if closure is None else real(closure)
    engine = _alive(ref, "step")
    if closure is None:
        engine.step_without_schedule()
        return None
    with torch.enable_grad():
        value = closure()
    engine.step_without_schedule()
    return value


def _zero_grad(ref: weakref.ref[Engine], real: Callable[..., Any], set_to_none: bool = True) -> None:
    """`optimizer.zero_grad()`: between two micro-steps the engine keeps what the step counts."""
    _alive(ref, "zero_grad").drop_gradients()


def _alive(ref: weakref.ref[Engine], call: str) -> Engine:
    engine = ref()
    if engine is None:
        raise RuntimeError(
            f"optimizer.{call}(): the engine that initialize() returned is gone, and with it the gradients of this "
            "optimizer: keep the engine as long as you train"
        )
    return engine


class EngineOptimizerCalls:
    """What the optimizer's methods come to; mixed into `Engine`."""

    def step_without_schedule(self: Engine) -> None:  # type: ignore[misc]
        """`step`, but the learning-rate schedule stays where it is; without gradients it warns and changes nothing.

        Raises:
            CallOrderError: the number of micro-steps since the last update is neither one nor all of a step; or the
                gradients of a plain backward miss something.
        """
        self.clock.settle()
        self.clock.require_open("optimizer.step")
        if self.clock.phase is Phase.IDLE and not self.parts.partition.has_plain_gradients():
            warnings.warn(
                f"optimizer.step() found no gradients and changed nothing {self.clock.position}: call "
                "engine.backward(loss) first; where engine.step() is called, optimizer.step() is not needed",
                stacklevel=4,
            )
            return
        self.clock.join_micro_steps()
        self.end_micro_step(lambda: None)

    def drop_gradients(self: Engine) -> None:  # type: ignore[misc]
        """Forget the gradients of a step that has just begun, and those of backwards that were not the engine's.

        Raises:
            CallOrderError: after a backward in the middle of a step, whose earlier micro-steps would be lost.
        """
        self.clock.settle()
        self.clock.require_open("optimizer.zero_grad")
        if self.clock.phase is Phase.BACKWARD:
            self.zero_grad()
        else:
            self.parts.partition.drop_plain_gradients()
