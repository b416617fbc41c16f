"""Phases, boundaries, counters."""

from __future__ import annotations

import pytest

from zengine.clock import Boundary, CallOrderError, Clock, Phase


def one_micro_step(clock: Clock) -> bool:
    clock.forward(with_grad=True)
    with clock.backward():
        pass
    micro = clock.end_micro_step()
    if micro.is_last:
        clock.end_step(applied=True)
    return micro.is_last


def test_every_nth_micro_step_is_a_boundary():
    clock = Clock(accumulation=3, samples_per_micro_step=4)
    assert [one_micro_step(clock) for _ in range(7)] == [False, False, True, False, False, True, False]
    assert (clock.steps, clock.micro_steps, clock.samples, clock.index) == (2, 7, 24, 1)


def test_the_boundary_is_decided_when_backward_begins():
    clock = Clock(accumulation=2, samples_per_micro_step=1)
    clock.forward(with_grad=True)
    with clock.backward() as micro:
        assert (micro.index, micro.count, micro.step, micro.is_last) == (0, 2, 0, False)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda c: c.end_micro_step(),
            r"step\(\) called in phase IDLE; legal here: forward\(\). \(micro-step 1 of 2, step 0\)",
        ),
        (lambda c: c.backward().__enter__(), r"backward\(\) called in phase IDLE; legal here: forward\(\)"),
    ],
)
def test_calls_in_a_wrong_order_say_what_is_legal_and_where_we_are(call, message):
    with pytest.raises(CallOrderError, match=message):
        call(Clock(accumulation=2, samples_per_micro_step=1))


def test_step_after_forward_without_backward_is_refused():
    clock = Clock(accumulation=1, samples_per_micro_step=1)
    clock.forward(with_grad=True)
    with pytest.raises(CallOrderError, match=r"phase FORWARD; legal here: forward\(\), backward\(\)"):
        clock.end_micro_step()


def test_nothing_is_legal_after_close():
    clock = Clock(accumulation=1, samples_per_micro_step=1)
    clock.close()
    with pytest.raises(CallOrderError, match="the engine is closed"):
        clock.forward(with_grad=True)


def test_an_evaluation_between_backward_and_step_changes_nothing():
    clock = Clock(accumulation=1, samples_per_micro_step=1)
    clock.forward(with_grad=False)
    assert clock.phase is Phase.IDLE
    clock.forward(with_grad=True)
    with clock.backward():
        pass
    clock.forward(with_grad=False)
    assert clock.end_micro_step().is_last


def test_an_exception_in_backward_begins_the_step_again_and_says_so():
    clock = Clock(accumulation=3, samples_per_micro_step=1)
    one_micro_step(clock)
    clock.forward(with_grad=True)
    with pytest.raises(ValueError, match="inside") as caught, clock.backward():
        raise ValueError("inside")
    assert "the step begins again" in caught.value.__notes__[0]
    assert (clock.phase, clock.index, clock.steps) == (Phase.IDLE, 0, 0)


def test_a_forced_boundary_holds_once_and_a_withheld_one_until_changed():
    clock = Clock(accumulation=2, samples_per_micro_step=5)
    clock.boundary = Boundary.FORCED
    assert one_micro_step(clock)
    assert clock.samples == 5
    clock.boundary = Boundary.WITHHELD
    assert [one_micro_step(clock) for _ in range(4)] == [False] * 4
    clock.boundary = Boundary.FORCED
    assert one_micro_step(clock)
    assert clock.samples == 30


def test_skipped_steps_count_as_steps():
    clock = Clock(accumulation=1, samples_per_micro_step=2)
    clock.forward(with_grad=True)
    with clock.backward():
        pass
    clock.end_micro_step()
    clock.end_step(applied=False)
    assert (clock.steps, clock.applied_steps, clock.skipped_steps, clock.samples) == (1, 0, 1, 2)


def test_counters_survive_a_round_trip():
    clock, other = (Clock(accumulation=1, samples_per_micro_step=2) for _ in range(2))
    for _ in range(3):
        one_micro_step(clock)
    other.load_state_dict(clock.state_dict())
    assert other.state_dict() == clock.state_dict()
    assert other.is_between_steps
