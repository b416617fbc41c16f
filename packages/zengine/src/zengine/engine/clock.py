"""The one answer to "where are we?": phase, micro-step, step, and whether a boundary is due.

Problem.  An engine that decides in five places whether the accumulation boundary has been reached decides
differently in one of them.

Design.  The boundary is decided once, when backward begins, and travels as a frozen `MicroStep`.  Calls in a
wrong order raise with the phase, what is legal, and the position.  Counters live here too, so that a checkpoint
saves one object and a chart has one x axis.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, final

import attrs


class Phase(enum.Enum):
    """What the engine has done in this micro-step."""

    IDLE = "IDLE"  # nothing yet; legal: forward
    FORWARD = "FORWARD"  # a forward with gradients; legal: forward, backward
    BACKWARD = "BACKWARD"  # gradients are there; legal: forward, backward, step
    HALF_LOADED = "HALF LOADED"  # a load failed after it had touched tensors; legal: loads
    CLOSED = "CLOSED"  # closed; legal: nothing


_LEGAL = {
    Phase.IDLE: "forward()",
    Phase.FORWARD: "forward(), backward()",
    Phase.BACKWARD: "forward(), backward(), step()",
    Phase.HALF_LOADED: "load_checkpoint()",
    Phase.CLOSED: "nothing: the engine is closed",
}


class Boundary(enum.Enum):
    """Who decides whether the next step() updates the weights."""

    COUNTED = "counted"  # every `accumulation`-th micro-step
    FORCED = "forced"  # the next one, until told otherwise
    WITHHELD = "withheld"  # not until told otherwise


class Sync(enum.Enum):
    """What a backward does with its gradients."""

    REDUCE = "reduce"  # they are summed over ranks, as the policy says
    LOCAL = "local"  # they stay on this rank until a later one: costs a whole gradient on each


class CallOrderError(RuntimeError):
    """forward, backward and step were called in an order that makes no sense."""


class HalfLoaded(CallOrderError):
    """A load has failed after it had touched tensors, and none has succeeded since: the engine holds a mixture."""


class Pending(Protocol):
    """A backward that somebody else runs."""

    def settle(self) -> None:
        """It has ended, whether or not that was told; afterwards the clock has no pending one."""


_COUNTERS = ("micro_steps", "steps", "applied_steps", "skipped_steps", "samples")
_MAX_COUNT = 2**53  # exact as a float, too
_MAX_EXPONENT = 1000  # two to that is a float
WEIGHTS = frozenset({"weights"})  # what a load of weights alone touches
UNWEIGHTED = -(2**31)  # as an exponent of weights: no loss has had a weight yet


@attrs.frozen(kw_only=True)
class MicroStep:
    """One forward-backward within a step."""

    index: int  # 0-based, within the step
    count: int  # micro-steps that make up the step: what the loss is divided by
    step: int  # 0-based number of the step
    is_first: bool  # whether no backward of the step came before
    is_last: bool  # whether step() will update the weights
    sync: Sync = Sync.REDUCE


@final
@attrs.define(eq=False)
class Clock:
    """Phase and counters of one engine.

    Invariants: `index < accumulation` unless the boundary is withheld; `steps == applied_steps + skipped_steps`.
    """

    accumulation: int  # micro-steps per step
    samples_per_micro_step: int  # over all replicas
    phase: Phase = Phase.IDLE
    boundary: Boundary = Boundary.COUNTED
    sync: Sync = Sync.REDUCE
    pending: Pending | None = None  # a backward that the caller runs, see torch_style.py
    withheld: bool = False  # whether the boundary was, at the last backward
    weight_exponent: int = UNWEIGHTED  # weights of losses are counted in units of two to that; see loss_weighting.py
    index: int = 0  # micro-steps done in the current step
    forwards: int = 0  # with gradients, since the last micro-step was counted, that no backward has followed
    pairs: int = 0  # backwards since then that had a forward of their own
    micro_steps: int = 0  # micro-steps ever
    steps: int = 0  # boundaries ever, skipped ones too
    applied_steps: int = 0
    skipped_steps: int = 0
    samples: int = 0  # samples of all steps that are complete
    step_samples: int | None = None  # samples of the step at whose boundary we are, if a feature knows better
    failed_load: str = ""  # which load has left the engine HALF_LOADED, and why
    mixed: frozenset[str] = frozenset()  # what that load has touched and no other has restored since

    def micro_step(self) -> MicroStep:
        """The micro-step that is running."""
        return MicroStep(
            index=self.index,
            count=self.accumulation,
            step=self.steps,
            is_first=self.index == 0 and self.phase is Phase.FORWARD,
            is_last=self.at_boundary,
            sync=self.sync,
        )

    @property
    def at_boundary(self) -> bool:
        """Return whether the next step() updates the weights."""
        if self.boundary is Boundary.COUNTED:
            return self.index + 1 >= self.accumulation
        return self.boundary is Boundary.FORCED

    @property
    def is_between_steps(self) -> bool:
        """Return whether no gradient of an unfinished step is pending."""
        return self.index == 0 and self.phase in (Phase.IDLE, Phase.FORWARD)

    def forward(self, *, with_grad: bool) -> None:
        """A forward begins; one without gradients (evaluation) leaves the phase as it is."""
        self._require("forward", Phase.IDLE, Phase.FORWARD, Phase.BACKWARD)
        if with_grad and self.phase is Phase.BACKWARD and self.boundary is not Boundary.COUNTED:
            self._count_micro_step()  # the caller decides about boundaries and calls step() at those only
        if with_grad and self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD
        self.forwards += with_grad

    @contextmanager
    def backward(self) -> Iterator[MicroStep]:
        """A backward; an exception inside takes the engine back to the beginning of the step."""
        self._require("backward", Phase.FORWARD, Phase.BACKWARD)
        if self.phase is Phase.BACKWARD and self.withheld:
            self._count_micro_step()  # the caller decides about boundaries, and ran several forwards ahead
            self.phase = Phase.FORWARD
        micro, self.withheld = self.micro_step(), self.boundary is Boundary.WITHHELD
        try:
            yield micro
        except BaseException as error:
            _add_note(
                error,
                f"engine: the gradients of step {self.steps} so far (micro-step {self.index + 1} of "
                f"{self.accumulation}) were dropped; the step begins again with the next forward().",
            )
            self.phase, self.index = Phase.IDLE, 0
            self.forwards = self.pairs = 0
            raise
        self.phase = Phase.BACKWARD
        self._pair()

    @contextmanager
    def batch(self) -> Iterator[MicroStep]:
        """All micro-steps of a step at once, in whatever order; afterwards the step is due."""
        self._require("train_batch", Phase.IDLE)
        self.index, self.phase = 0, Phase.FORWARD
        try:
            yield attrs.evolve(self.micro_step(), is_last=True)
        except BaseException:
            self.phase = Phase.IDLE
            raise
        self.phase, self.index = Phase.IDLE, self.accumulation
        self.micro_steps += self.accumulation

    def end_micro_step(self) -> MicroStep:
        """step() was called: count the micro-step and say whether the weights are due."""
        self._require("step", Phase.BACKWARD)
        micro = self.micro_step()
        if micro.is_last and self.sync is Sync.LOCAL:
            raise CallOrderError(
                f"step() {self.position} would update the weights, but is inside no_sync(), where gradients are of "
                "this rank alone. Leave no_sync() before the last backward of a step, or before its step()."
            )
        self._count_micro_step()
        return micro

    @contextmanager
    def update(self) -> Iterator[None]:
        """A boundary; an exception inside leaves the engine at the beginning of the next attempt at this step."""
        try:
            yield
        except BaseException:
            self.phase, self.index, self.step_samples = Phase.IDLE, 0, None
            raise

    def end_step(self, *, applied: bool) -> None:
        """A boundary is over, applied or skipped."""
        counted = self.index * self.samples_per_micro_step
        self.samples += counted if self.step_samples is None else self.step_samples
        self.index, self.step_samples = 0, None
        self.steps += 1
        self.applied_steps += applied
        self.skipped_steps += not applied

    def restart_step(self) -> None:
        """The gradients of the step so far are dropped; a backward of what was computed last is legal still."""
        self.index = self.forwards = self.pairs = 0
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.FORWARD

    def accept_backward(self) -> None:
        """Gradients have come from a backward that the engine was not told of."""
        self._require("step", Phase.IDLE, Phase.FORWARD)
        self.phase = Phase.BACKWARD

    def join_micro_steps(self) -> None:
        """step() will be called once for all backwards since the last one: for one micro-step, or for all of a step.

        Raises:
            CallOrderError: they are some other number.
        """
        if self.boundary is not Boundary.COUNTED or self.accumulation == 1 or self.pairs <= 1:
            return
        if self.index > 0 or self.pairs != self.accumulation:
            raise CallOrderError(
                f"optimizer.step() after {self.pairs} micro-steps {self.position}, where gradient_accumulation_steps "
                f"= {self.accumulation}: call it after every micro-step (the weights change at the last one of a "
                f"step), or after every {self.accumulation}"
            )
        self.index += self.accumulation - 1
        self.micro_steps += self.accumulation - 1

    @contextmanager
    def local(self) -> Iterator[None]:
        """Inside, backwards reduce nothing."""
        before, self.sync = self.sync, Sync.LOCAL
        try:
            yield
        finally:
            self.sync = before

    @property
    def position(self) -> str:
        """Return where we are, for messages."""
        return f"(micro-step {self.index + 1} of {self.accumulation}, step {self.steps})"

    def require_forward(self, call: str) -> None:
        """Refuse `call` before the first forward of a micro-step."""
        self._require(call, Phase.FORWARD, Phase.BACKWARD)

    def require_open(self, call: str) -> None:
        """Refuse `call` after close()."""
        self._require(call, Phase.IDLE, Phase.FORWARD, Phase.BACKWARD)

    def close(self) -> None:
        """Nothing is legal any more."""
        self.phase = Phase.CLOSED

    def require_loadable(self, call: str) -> None:
        """Refuse `call` after close() alone: a load may follow one that has failed."""
        self._require(call, Phase.IDLE, Phase.FORWARD, Phase.BACKWARD, Phase.HALF_LOADED)

    @contextmanager
    def loading(self, what: str, parts: frozenset[str] = WEIGHTS, *, is_whole: bool = True) -> Iterator[None]:
        """Around the part of a load that touches tensors: after an error only loads that restore the same are legal.

        what: the load in words, for the error of whoever goes on all the same.
        parts: what it touches.  is_whole: all of that will be restored, and not only what happens to be there.
        """
        self.settle()
        before, told = self.phase, self.failed_load
        self.mixed |= parts
        self.phase, self.failed_load = Phase.HALF_LOADED, f"{what} was interrupted"
        try:
            yield
        except BaseException as error:
            self.failed_load = f"{what} failed ({type(error).__name__}: {error})"
            _add_note(error, f"engine: {self._half_loaded}")
            raise
        was_half_loaded = before is Phase.HALF_LOADED
        self.mixed = self.mixed - parts if is_whole or not was_half_loaded else self.mixed
        self.failed_load = told if self.mixed else ""
        if not self.mixed:
            self.phase = Phase.IDLE if was_half_loaded else before

    def begin_step(self) -> None:
        """Whatever was under way is forgotten."""
        self.phase, self.index = Phase.IDLE, 0
        self.forwards = self.pairs = 0

    def state_dict(self) -> dict[str, int]:
        """The counters; a clock is saved between steps only."""
        return {name: getattr(self, name) for name in (*_COUNTERS, "weight_exponent")}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters; the phase becomes IDLE."""
        self.prepare_load(state)()
        self.begin_step()

    def prepare_load(self, state: Mapping[str, int]) -> Callable[[], None]:
        """Check what `state_dict` returned; the result restores the counters.

        Raises:
            ValueError: a counter is missing, or cannot be one.
        """
        counters = {name: _counter(state, name) for name in _COUNTERS}
        if counters["steps"] != counters["applied_steps"] + counters["skipped_steps"]:
            raise ValueError(
                f"steps = {counters['steps']} is not applied_steps + skipped_steps = "
                f"{counters['applied_steps']} + {counters['skipped_steps']}"
            )
        exponent = state.get("weight_exponent", self.weight_exponent)
        is_power = type(exponent) is int and (exponent == UNWEIGHTED or abs(exponent) <= _MAX_EXPONENT)
        if not is_power:
            raise ValueError(f"weight_exponent = {exponent!r} is no exponent of a power of two")

        def commit() -> None:
            for name, value in (*counters.items(), ("weight_exponent", exponent)):
                setattr(self, name, value)

        return commit

    def _count_micro_step(self) -> None:
        self.phase = Phase.IDLE
        self.micro_steps += 1
        self.index += 1
        self.forwards = self.pairs = 0

    def _pair(self) -> None:
        """A backward has come to its end, of a forward of its own or of one that had others before."""
        is_first = self.forwards > 0 or self.pairs == 0
        self.pairs += is_first
        self.forwards = max(self.forwards - 1, 0)

    def settle(self) -> None:
        """A backward that the caller ran is over."""
        if self.pending is not None:
            self.pending.settle()

    def _require(self, call: str, *legal: Phase) -> None:
        self.settle()
        if self.phase not in legal:
            if self.phase is Phase.HALF_LOADED:
                raise HalfLoaded(f"{call}() is refused: {self._half_loaded}")
            raise CallOrderError(
                f"{call}() called in phase {self.phase.value}; legal here: {_LEGAL[self.phase]}. {self.position}"
            )

    @property
    def _half_loaded(self) -> str:
        return (
            f"{self.failed_load} after tensors had been touched, so this engine holds parts of two states (of its "
            f"{', '.join(sorted(self.mixed))}). Load a checkpoint that is whole: engine.load_checkpoint(...)."
        )


def _counter(state: Mapping[str, int], name: str) -> int:
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} = {value!r} must be a whole number from 0 to {_MAX_COUNT}")
    return value


def _add_note(error: BaseException, note: str) -> None:
    """Return what Python 3.11 does with `add_note`, for 3.10 too: tracebacks there ignore it, debuggers show it."""
    error.__dict__.setdefault("__notes__", []).append(note)
