"""Clock: phase, micro-step, step, and whether the next step() is an accumulation boundary.

Problem.  An engine that decides about the accumulation boundary in several places can decide inconsistently.

Design.  The boundary is decided once, when backward begins, and travels as a frozen `MicroStep`.  Calls in a wrong
order raise with the phase, the legal calls and the position.  The counters are here too, so that a checkpoint saves
one object, and all charts share one x axis.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol, final

import attrs

from zengine.pages import Page, explained


class Phase(enum.Enum):
    """Progress within a micro-step."""

    IDLE = "IDLE"  # before forward; legal: forward, backward
    FORWARD = "FORWARD"  # after a forward with gradients; legal: forward, backward
    BACKWARD = "BACKWARD"  # after a backward; legal: forward, backward, step
    HALF_LOADED = "HALF LOADED"  # a load failed after it had changed tensors; legal: loads
    CLOSED = "CLOSED"  # after close(); legal: nothing


_LEGAL = {
    Phase.IDLE: "forward(), backward()",
    Phase.FORWARD: "forward(), backward()",
    Phase.BACKWARD: "forward(), backward(), step()",
    Phase.HALF_LOADED: "load_checkpoint()",
    Phase.CLOSED: "nothing: the engine is closed",
}


_REMEDIES = {
    "step": " Call engine.backward(loss) before each step(): loss = engine(batch); engine.backward(loss); "
    "engine.step().",
    "train_batch": " End the step with step() first, or drop it with engine.restart_step().",
}
_AFTER_CLOSE = " Make a new engine with zengine.initialize()."


class Boundary(enum.Enum):
    """Rule for whether the next step() updates the weights."""

    COUNTED = "counted"  # every `accumulation`-th micro-step
    FORCED = "forced"  # always, until changed
    WITHHELD = "withheld"  # never, until changed


class Sync(enum.Enum):
    """Destination of a backward's gradients."""

    REDUCE = "reduce"  # summed over ranks, by the policy
    LOCAL = "local"  # kept on this rank until a later reduction: costs a whole gradient per rank


@explained(Page.CALL_ORDER)
class CallOrderError(RuntimeError, AssertionError):
    """forward, backward and step were called in a wrong order.  DeepSpeed raises AssertionError for that."""


class HalfLoaded(CallOrderError):
    """A load failed after it had changed tensors, and none has succeeded since: parts of two states."""


class Pending(Protocol):
    """Backward that the caller runs."""

    def finish(self) -> None:
        """End the backward, which is over; afterwards the clock has no pending one."""


_COUNTERS = ("micro_steps", "steps", "applied_steps", "skipped_steps", "samples")
_MAX_COUNT = 2**53  # exact as a float too
_MAX_EXPONENT = 1000  # 2.0 ** this is finite
WEIGHTS = frozenset({"weights"})  # parts that a load of weights changes
UNWEIGHTED = -(2**31)  # exponent of weights while no loss has had a weight


@attrs.frozen(kw_only=True)
class MicroStep:
    """One forward-backward within a step."""

    index: int  # 0-based, within the step
    count: int  # micro-steps of the step: the divisor of the loss
    step: int  # 0-based number of the step
    is_first: bool  # no earlier backward in the step
    is_last: bool  # step() will update the weights
    sync: Sync = Sync.REDUCE


@final
@attrs.define(eq=False)
class Clock:
    """Phase and counters of one engine.

    Invariants: `index < accumulation` unless the boundary is withheld; `steps == applied_steps + skipped_steps`.
    """

    accumulation: int  # micro-steps per step
    samples_per_micro_step: int  # over all replicas
    uneven_batch: int = 0  # samples of a step whose micro-steps differ; 0: they are equal
    phase: Phase = Phase.IDLE
    boundary: Boundary = Boundary.COUNTED
    sync: Sync = Sync.REDUCE
    pending: Pending | None = None  # a backward that the caller runs, see torch_style.py
    withheld: bool = False  # the boundary was withheld at the last backward
    weight_exponent: int = UNWEIGHTED  # unit of loss weights is 2 ** this; see loss_weighting.py
    index: int = 0  # micro-steps done in the current step
    forwards: int = 0  # with gradients, in this micro-step, without a backward yet
    pairs: int = 0  # backwards in this micro-step with a forward of their own
    direct: int = 0  # backwards in this micro-step, all without a forward: the caller ran the module itself
    micro_steps: int = 0  # micro-steps ever
    steps: int = 0  # boundaries ever, skipped ones too
    applied_steps: int = 0
    skipped_steps: int = 0
    samples: int = 0  # samples of all complete steps
    step_samples: int | None = None  # samples of the step at its boundary, if a feature counts them
    failed_load: str = ""  # the load that left the engine HALF_LOADED, and its error
    mixed: frozenset[str] = frozenset()  # parts that this load changed and no later load restored

    def micro_step(self) -> MicroStep:
        """Return the running micro-step."""
        return MicroStep(
            index=self.index,
            count=self.accumulation,
            step=self.steps,
            is_first=self.index == 0 and self.phase is not Phase.BACKWARD,
            is_last=self.at_boundary,
            sync=self.sync,
        )

    @property
    def at_boundary(self) -> bool:
        """Return True if the next step() updates the weights."""
        if self.boundary is Boundary.COUNTED:
            return self.index + 1 >= self.accumulation
        return self.boundary is Boundary.FORCED

    @property
    def is_between_steps(self) -> bool:
        """Return True if no gradients of an unfinished step are pending."""
        return self.index == 0 and self.phase in (Phase.IDLE, Phase.FORWARD)

    def forward(self, *, with_grad: bool) -> None:
        """Begin a forward; one without gradients (evaluation) does not change the phase."""
        self._require("forward", Phase.IDLE, Phase.FORWARD, Phase.BACKWARD)
        if with_grad and self.phase is Phase.BACKWARD and self.boundary is not Boundary.COUNTED:
            self._count_micro_step()  # the caller sets the boundaries and calls step() only there
        if with_grad and self.phase is Phase.IDLE:
            self.phase = Phase.FORWARD
        self.forwards += with_grad

    @contextmanager
    def backward(self) -> Iterator[MicroStep]:
        """Run a backward inside; an exception resets the engine to the beginning of the step."""
        self._require("backward", Phase.IDLE, Phase.FORWARD, Phase.BACKWARD)
        is_direct = self.phase is Phase.IDLE or (self.direct > 0 and self.forwards == 0)
        is_forced = self.boundary is Boundary.FORCED
        if self.phase is Phase.BACKWARD and (self.withheld or (is_direct and is_forced)):
            self._count_micro_step()  # the caller sets the boundaries, and ran several forwards first
        micro, self.withheld = self.micro_step(), self.boundary is Boundary.WITHHELD
        try:
            yield micro
        except BaseException as error:
            _add_note(
                error,
                f"engine: the gradients of step {self.steps} so far (micro-step {self.index + 1} of "
                f"{self.accumulation}) were dropped; the step begins again with the next forward().",
            )
            self.begin_step()
            raise
        self.phase = Phase.BACKWARD
        self.direct += is_direct
        self._count_pair()

    @contextmanager
    def batch(self) -> Iterator[MicroStep]:
        """Run all micro-steps of a step inside, in any order; afterwards the step is due."""
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
        """Count the micro-step at step(); return it, with `is_last` if an update is due."""
        self._require("step", Phase.BACKWARD)
        micro = self.micro_step()
        if micro.is_last and self.sync is Sync.LOCAL:
            raise CallOrderError(
                "It is illegal to call Engine.step() inside no_sync context manager: step() "
                f"{self.position} would update the weights inside no_sync(), where gradients are not reduced. Leave "
                "no_sync() before the last backward of a step, or before its step()."
            )
        self._count_micro_step()
        return micro

    @contextmanager
    def update(self) -> Iterator[None]:
        """Run a boundary inside; an exception resets the engine to the beginning of the same step."""
        try:
            yield
        except BaseException:
            self.phase, self.index, self.step_samples = Phase.IDLE, 0, None
            raise

    def end_step(self, *, applied: bool) -> None:
        """Count a boundary, applied or skipped."""
        counted = self.uneven_batch or self.index * self.samples_per_micro_step
        self.samples += counted if self.step_samples is None else self.step_samples
        self.index, self.step_samples = 0, None
        self.steps += 1
        self.applied_steps += applied
        self.skipped_steps += not applied

    def restart_step(self) -> None:
        """Drop the step's progress; a backward of the last forward stays legal."""
        self.index = self.forwards = self.pairs = self.direct = 0
        if self.phase is Phase.BACKWARD:
            self.phase = Phase.FORWARD

    def join_micro_steps(self, num_plain: int = 0) -> None:
        """Prepare a step() that stands for all backwards since the last one: one micro-step, or all of a step.

        num_plain: number of plain `loss.backward()` calls since then.

        Raises:
            CallOrderError: another number of micro-steps, or an unknown one.
        """
        if self.boundary is not Boundary.COUNTED or self.accumulation == 1:
            return
        if self.direct > 1 or num_plain > 1:
            kind = "plain loss.backward() calls" if num_plain > 1 else "backwards without a forward of the engine"
            raise CallOrderError(
                f"optimizer.step() {self.position} after {max(self.direct, num_plain)} {kind}, whose micro-steps it "
                "cannot count: call engine.step() after every micro-step, or use loss = engine(...) and "
                "engine.backward(loss)"
            )
        if self.pairs <= 1:
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
        """Keep gradients of backwards inside on this rank."""
        before, self.sync = self.sync, Sync.LOCAL
        try:
            yield
        finally:
            self.sync = before

    @property
    def position(self) -> str:
        """Return the position in words, for messages."""
        return f"(micro-step {self.index + 1} of {self.accumulation}, step {self.steps})"

    def require_open(self, call: str) -> None:
        """Raise CallOrderError after close(), and HalfLoaded after a failed load."""
        self._require(call, Phase.IDLE, Phase.FORWARD, Phase.BACKWARD)

    def close(self) -> None:
        """Make every later call raise."""
        self.phase = Phase.CLOSED

    def require_loadable(self, call: str) -> None:
        """Raise CallOrderError after close(); a load may follow a failed one."""
        self._require(call, Phase.IDLE, Phase.FORWARD, Phase.BACKWARD, Phase.HALF_LOADED)

    @contextmanager
    def loading(self, what: str, parts: frozenset[str] = WEIGHTS, *, is_whole: bool = True) -> Iterator[None]:
        """Change tensors by a load inside; after an error only loads that restore the same parts are legal.

        what: name of the load, for later errors.
        parts: parts that it changes.  is_whole: it restores all of them, not only those in the checkpoint.
        """
        self.finish_pending()
        before, previous = self.phase, self.failed_load
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
        self.failed_load = previous if self.mixed else ""
        if not self.mixed:
            self.phase = Phase.IDLE if was_half_loaded else before

    def begin_step(self) -> None:
        """Forget all progress of the running step."""
        self.phase, self.index = Phase.IDLE, 0
        self.forwards = self.pairs = self.direct = 0

    def state_dict(self) -> dict[str, int]:
        """Return the counters of the last boundary."""
        counters = {name: getattr(self, name) for name in (*_COUNTERS, "weight_exponent")}
        return {**counters, "micro_steps": self.micro_steps - self.index}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restore the counters; the phase becomes IDLE."""
        self.prepare_load(state)()
        self.begin_step()

    def prepare_load(self, state: Mapping[str, int]) -> Callable[[], None]:
        """Check a state of `state_dict`; return a function that restores the counters.

        Raises:
            ValueError: a counter is missing or invalid.
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
            raise ValueError(f"weight_exponent = {exponent!r} is not an exponent of a power of two")

        def commit() -> None:
            for name, value in (*counters.items(), ("weight_exponent", exponent)):
                setattr(self, name, value)

        return commit

    def _count_micro_step(self) -> None:
        self.phase = Phase.IDLE
        self.micro_steps += 1
        self.index += 1
        self.forwards = self.pairs = self.direct = 0

    def _count_pair(self) -> None:
        """Count a backward at its end, if its forward had none before."""
        is_first = self.forwards > 0 or self.pairs == 0
        self.pairs += is_first
        self.forwards = max(self.forwards - 1, 0)

    def finish_pending(self) -> None:
        """End a backward that the caller ran, if there is one."""
        if self.pending is not None:
            self.pending.finish()

    def _require(self, call: str, *legal: Phase) -> None:
        self.finish_pending()
        if self.phase not in legal:
            if self.phase is Phase.HALF_LOADED:
                raise HalfLoaded(f"{call}() is not possible: {self._half_loaded}")
            remedy = _AFTER_CLOSE if self.phase is Phase.CLOSED else _REMEDIES.get(call, "")
            raise CallOrderError(
                f"{call}() called in phase {self.phase.value}; legal here: {_LEGAL[self.phase]}. "
                f"{self.position}{remedy}"
            )

    @property
    def _half_loaded(self) -> str:
        return (
            f"{self.failed_load} after tensors had changed, so this engine holds parts of two states (of its "
            f"{', '.join(sorted(self.mixed))}). Load a complete checkpoint: engine.load_checkpoint(...)."
        )


def _counter(state: Mapping[str, int], name: str) -> int:
    value = state.get(name) if isinstance(state, Mapping) else None
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{name} = {value!r} must be a whole number from 0 to {_MAX_COUNT}")
    return value


def _add_note(error: BaseException, note: str) -> None:
    """Add a note as Python 3.11's `add_note` does; tracebacks of 3.10 ignore it, debuggers show it."""
    error.__dict__.setdefault("__notes__", []).append(note)
