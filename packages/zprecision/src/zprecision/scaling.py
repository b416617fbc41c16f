"""Loss scaling: multiplies the loss before backward, so that small fp16 gradients do not underflow.

The order of a step matters.  The scale enters the gradients when backward runs, so the gradients must be divided
by that same scale, and only then may it change:

    scaler.scale(loss).backward()                     # the factor goes in
    stats = inspect(gradients)                        # of the gradients as they are, still scaled
    if stats.finite:
        optimizer.grad_scale = clip_divisor(stats.norm, scaler.factor, max_norm)
        optimizer.step()                              # the same factor comes out
    scaler.update(stats.found_inf)                    # the factor moves, last

Updating before dividing halves the one update at which the scale doubles; dividing without having multiplied shrinks
every update by the scale.  Both bugs have shipped in widely used libraries.  `update` binds a new `factor` tensor and
never writes into the old one, so whatever holds the old factor stays correct.  Only `update_in_place` does, for CUDA
graphs, in which nothing is bound.

[Note: no host sync]  Factor and counters are () tensors on the training device, and `advance` in zprecision.rules is
branch-free arithmetic on them, so the host never waits to learn whether a step overflowed.  Only `state_dict` and
`at_floor` read them.

Rejected: torch.amp.GradScaler.  It keeps a found_inf per optimizer and device, whereas with sharded gradients the
decision is one value that every rank shares; and it has neither hysteresis nor a floor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zprecision import checks
from zprecision.rules import DynamicScaling, Scaling, StaticScaling, Unscaled, advance

_CPU = torch.device("cpu")


class Scaler(Protocol):
    """Interface of loss scaling for a training loop; `NoScaling` is the identity."""

    @property
    def factor(self) -> Tensor:
        """() float32 on the device: multiplies the loss in `scale`. Read it anew every step, before `update`."""

    @property
    def at_floor(self) -> bool:
        """True if a dynamic factor is at its minimum, so the next overflow cannot lower it. Waits for the device."""

    def scale(self, loss: Tensor) -> Tensor:
        """Return `loss` times the factor; float16 and bf16 losses become float32."""

    def update(self, found_inf: Tensor) -> None:
        """End a step. found_inf: one element of any dtype; non-zero or NaN marks an overflow."""

    def update_in_place(self, found_inf: Tensor) -> Tensor:
        """End a step as `update` does, in the present tensors, so that a CUDA graph can repeat it.

        Return () bool on the device: `at_floor` before.
        """

    def state_dict(self) -> dict[str, float | int]:
        """Return plain floats and ints, exact through JSON."""

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore `state_dict()`. Raises for a state of another scaler or out of range, before any change."""

    def prepare_load(self, state: Mapping[str, float | int]) -> Callable[[], None]:
        """Check a state as `load_state_dict` does and change nothing; return a function that restores it.

        The function cannot fail.
        """


@final
@attrs.define(eq=False)
class NoScaling:
    """The identity: the factor is 1, and an overflow changes nothing."""

    device: torch.device = attrs.field(default=_CPU, converter=torch.device)
    factor: Tensor = attrs.field(init=False)  # () float32, 1.0, never replaced

    def __attrs_post_init__(self) -> None:
        self.factor = torch.ones((), dtype=torch.float32, device=self.device)

    @property
    def at_floor(self) -> bool:
        return False

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def update(self, found_inf: Tensor) -> None:
        _check_found_inf(found_inf)

    def update_in_place(self, found_inf: Tensor) -> Tensor:
        self.update(found_inf)
        return torch.zeros((), dtype=torch.bool, device=self.device)

    def state_dict(self) -> dict[str, float | int]:
        return {}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, float | int]) -> Callable[[], None]:
        checks.check_keys(self, state, ())
        return _no_op


@final
@attrs.define(eq=False)
class StaticScaler:
    """Multiplies by a constant factor. Never `at_floor`: a static scale only skips the step."""

    rule: StaticScaling
    device: torch.device = attrs.field(default=_CPU, converter=torch.device)
    factor: Tensor = attrs.field(init=False)  # () float32, rule.factor, never replaced

    def __attrs_post_init__(self) -> None:
        self.factor = torch.full((), self.rule.factor, dtype=torch.float32, device=self.device)

    @property
    def at_floor(self) -> bool:
        return False

    def scale(self, loss: Tensor) -> Tensor:
        return _scaled(loss, self.factor)

    def update(self, found_inf: Tensor) -> None:
        _overflow(found_inf, self.device)

    def update_in_place(self, found_inf: Tensor) -> Tensor:
        self.update(found_inf)
        return torch.zeros((), dtype=torch.bool, device=self.device)

    def state_dict(self) -> dict[str, float | int]:
        return {"static_factor": checks.as_float32(self.rule.factor)}

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Check the state. The rule alone sets the factor; a state saved under another factor is rejected."""
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, float | int]) -> Callable[[], None]:
        checks.check_keys(self, state, ("static_factor",))
        only = checks.as_float32(self.rule.factor)
        checks.read_number(self, state, "static_factor", low=only, high=only)
        return _no_op


@final
@attrs.define(eq=False)
class DynamicScaler:
    """Grows after a window of clean steps, backs off when overflows have used up the hysteresis.

    Invariant: rule.floor <= factor < inf, 0 <= clean_steps <= rule.window and
    1 <= hysteresis_left <= rule.hysteresis.
    """

    rule: DynamicScaling = attrs.field(factory=DynamicScaling)
    device: torch.device = attrs.field(default=_CPU, converter=torch.device)
    # () float32 on device; replaced by update, never written into
    factor: Tensor = attrs.field(init=False)
    # () int32 on device; clean steps since the last growth or overflow; the factor grows when they pass rule.window
    clean_steps: Tensor = attrs.field(init=False)
    # () int32 on device; at 1 the next overflow lowers the factor
    hysteresis_left: Tensor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._set_state(self.rule.initial, 0, self.rule.hysteresis)

    @property
    def at_floor(self) -> bool:
        """True with the factor at its floor and the counter used up; read it before `update`."""
        return bool(self._at_floor())

    def scale(self, loss: Tensor) -> Tensor:
        return _scaled(loss, self.factor)

    def update(self, found_inf: Tensor) -> None:
        overflow = _overflow(found_inf, self.device)
        with torch.no_grad():
            self.factor, self.clean_steps, self.hysteresis_left = advance(
                self.rule, self.factor, self.clean_steps, self.hysteresis_left, overflow
            )

    def update_in_place(self, found_inf: Tensor) -> Tensor:
        before, at_floor = (self.factor, self.clean_steps, self.hysteresis_left), self._at_floor()
        self.update(found_inf)
        for place, value in zip(before, (self.factor, self.clean_steps, self.hysteresis_left)):
            place.copy_(value)
        self.factor, self.clean_steps, self.hysteresis_left = before
        return at_floor

    def _at_floor(self) -> Tensor:
        return (self.factor <= self.rule.floor) & (self.hysteresis_left <= 1)

    def state_dict(self) -> dict[str, float | int]:
        return {
            "factor": float(self.factor),
            "clean_steps": int(self.clean_steps),
            "hysteresis_left": int(self.hysteresis_left),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        self.prepare_load(state)()

    def prepare_load(self, state: Mapping[str, float | int]) -> Callable[[], None]:
        checks.check_keys(self, state, ("factor", "clean_steps", "hysteresis_left"))
        floor = checks.as_float32(self.rule.floor)
        return functools.partial(
            self._set_state,
            float(checks.read_number(self, state, "factor", low=floor, high=checks.FLOAT32_MAX)),
            checks.read_count(self, state, "clean_steps", low=0, high=self.rule.window),
            checks.read_count(self, state, "hysteresis_left", low=1, high=self.rule.hysteresis),
        )

    def _set_state(self, factor: float, clean_steps: int, hysteresis_left: int) -> None:
        self.factor = torch.full((), factor, dtype=torch.float32, device=self.device)
        self.clean_steps = torch.full((), clean_steps, dtype=torch.int32, device=self.device)
        self.hysteresis_left = torch.full((), hysteresis_left, dtype=torch.int32, device=self.device)


def make_scaler(rule: Scaling, device: torch.device | str) -> Scaler:
    """Return the scaler of `rule`, with its state on `device`. Raises TypeError for anything but the three rules.

    >>> import zprecision
    >>> scaler = zprecision.make_scaler(zprecision.DynamicScaling(initial=1024.0), "cpu")
    >>> scaler.factor.item()
    1024.0
    """
    if isinstance(rule, DynamicScaling):
        return DynamicScaler(rule, device)
    if isinstance(rule, StaticScaling):
        return StaticScaler(rule, device)
    if isinstance(rule, Unscaled):
        return NoScaling(device)
    raise TypeError(f"make_scaler got {rule!r}; pass Unscaled(), StaticScaling(factor) or DynamicScaling(...)")


def _no_op() -> None: ...


def _scaled(loss: Tensor, factor: Tensor) -> Tensor:
    if not loss.is_floating_point():
        raise TypeError(f"the loss is {loss.dtype}; it must be a floating-point tensor")
    # In float16 the product itself would overflow: 2**16 is infinite there.
    return loss.to(torch.promote_types(loss.dtype, torch.float32)) * factor


def _overflow(found_inf: Tensor, device: torch.device) -> Tensor:
    """() bool on device: True for any found_inf but zero, NaN included."""
    _check_found_inf(found_inf)
    return (found_inf.detach() != 0).reshape(()).to(device)


def _check_found_inf(found_inf: object) -> None:
    if not isinstance(found_inf, Tensor):
        raise TypeError(f"update(found_inf) got a {type(found_inf).__name__}; pass inspect(...).found_inf")
    if found_inf.numel() != 1:
        raise ValueError(
            f"update(found_inf) got shape {tuple(found_inf.shape)}; it must have one element:"
            " pass inspect(...).found_inf"
        )
