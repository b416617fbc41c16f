"""Calls of the returned optimizer in torch's style: `optimizer.step()` and `optimizer.zero_grad()`.

Problem.  The optimizer holds flat shards whose gradients exist only inside the engine's step.  Its own `step`, called
by user code in torch's style (or by Lightning Fabric), would find no gradient and train nothing.

Design.  While the engine lives, two methods of that one optimizer call the engine: `step` is the engine's (with its
boundary, loss scale, clipping and publishing) without the learning-rate schedule, which the caller steps, and
`zero_grad` drops the same gradients as torch's.  They are replaced on the instance, so the class, `isinstance`, state
dicts, copies and the wrappers that torch's schedules put around `step` stay unchanged.  The engine's own calls go
through `OwnStep`, which notes its thread (speculative updates have one), and reach the optimizer's real `step`.

With accumulation the caller may step after every micro-step, or only after the last one of a step; the clock
distinguishes these by the number of backwards, and raises for any other number.

Rejected.  Returning a wrapper (`isinstance(optimizer, AdamW)` and torch's schedules fail); changing the optimizer's
class (an instance's `step`, which torch's schedules write, hides it).
"""

from __future__ import annotations

import functools
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, final

import torch

from zengine.engine.clock import Phase
from zengine.engine.feature import Feature
from zengine.engine.parts import OwnStep, Run

EngineMethod = weakref.WeakMethod[Callable[[], None]]


@final
class OptimizerCalls(Feature):
    """Redirects `step` and `zero_grad` of the optimizer to the engine; `close` restores the optimizer's own."""

    def __init__(self, own: OwnStep, step: Callable[[], None], zero_grad: Callable[[], None]) -> None:
        """Make the feature.  step, zero_grad: bound methods of the engine, held weakly."""
        self.own = own
        self.step, self.zero_grad = weakref.WeakMethod(step), weakref.WeakMethod(zero_grad)
        self.close_methods: Callable[[], None] = lambda: None

    def attach(self, run: Run) -> None:
        optimizer = run.optimizer
        assert optimizer is not None
        replaced: dict[str, Any] = {
            name: vars(optimizer)[name] for name in ("step", "zero_grad") if name in vars(optimizer)
        }
        _replace(optimizer, "step", functools.partial(_step, self.step, self.own))
        _replace(optimizer, "zero_grad", functools.partial(_zero_grad, self.zero_grad))

        def restore() -> None:
            for name in ("step", "zero_grad"):
                vars(optimizer).pop(name, None)
            vars(optimizer).update(replaced)

        self.close_methods = restore

    def close(self) -> None:
        self.close_methods()


def _replace(optimizer: torch.optim.Optimizer, name: str, call: Callable[..., Any]) -> None:
    """Replace `optimizer.name(...)` by `call(real, ...)`, where `real` is the previous method.

    The replacement is a bound method: torch's schedules read its function and copy its attributes.
    """
    real = getattr(optimizer, name)

    @functools.wraps(real)
    def method(_self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        return call(real, *args, **kwargs)

    setattr(optimizer, name, types.MethodType(method, optimizer))


def _step(ref: EngineMethod, own: OwnStep, real: Callable[..., Any], closure: Callable[[], Any] | None = None) -> Any:
    """Implement `optimizer.step(closure)` by the engine's step; return the closure's value, or None without one."""
    if own.is_running:
        return real() if closure is None else real(closure)
    step = _alive(ref, "step")
    if closure is None:
        step()
        return None
    with torch.enable_grad():
        value = closure()
    step()
    return value


def _zero_grad(ref: EngineMethod, real: Callable[..., Any], set_to_none: bool = True) -> None:
    """Implement `optimizer.zero_grad()`; the engine keeps gradients of earlier micro-steps of a step."""
    _alive(ref, "zero_grad")()


def _alive(ref: EngineMethod, call: str) -> Callable[[], None]:
    method = ref()
    if method is None:
        raise RuntimeError(
            f"optimizer.{call}(): the engine that initialize() returned was deleted, and with it the gradients of "
            "this optimizer: keep a reference to the engine while you train"
        )
    return method


def is_step_due(run: Run) -> bool:
    """Prepare `optimizer.step()`, which ends one micro-step or a whole step; return True if the engine's step is due.

    Warns and returns False if there are no gradients.

    Raises:
        CallOrderError: the number of micro-steps since the last update is neither one nor all of a step.
    """
    run.clock.finish_pending()
    run.clock.require_open("optimizer.step")
    if run.clock.phase is Phase.IDLE and not run.parts.partition.has_plain_gradients():
        warnings.warn(
            f"optimizer.step() found no gradients and changed nothing {run.clock.position}: call "
            "engine.backward(loss) first; where engine.step() is called, optimizer.step() is not needed",
            stacklevel=5,
        )
        return False
    run.clock.join_micro_steps(run.parts.partition.num_plain_backwards())
    return True


def drop_plain_gradients(run: Run) -> bool:
    """Drop gradients of plain backwards for `optimizer.zero_grad()`.

    Returns True if the engine's own gradients must be dropped instead, by `zero_grad`.
    """
    run.clock.finish_pending()
    run.clock.require_open("optimizer.zero_grad")
    if run.clock.phase is Phase.BACKWARD:
        return True
    run.parts.partition.drop_plain_gradients()
    return False
