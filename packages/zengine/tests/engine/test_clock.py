"""Phases, boundaries, counters."""

from __future__ import annotations

import pytest

from zengine.engine.clock import Boundary, CallOrderError, Clock, HalfLoaded, Phase


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
            r"step\(\) called in phase IDLE; legal here: forward\(\), backward\(\). \(micro-step 1 of 2, step 0\)",
        ),
        (
            lambda c: c.close() or c.backward().__enter__(),
            r"backward\(\) called in phase CLOSED; legal here: nothing",
        ),
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


def test_a_backward_without_a_forward_begins_a_micro_step():
    clock = Clock(accumulation=2, samples_per_micro_step=1)
    for index in (0, 1):
        for is_first in (index == 0, False):
            with clock.backward() as micro:
                assert (micro.index, micro.is_first, micro.is_last) == (index, is_first, index == 1)
        assert clock.end_micro_step().is_last == (index == 1)
    clock.end_step(applied=True)
    assert (clock.steps, clock.micro_steps, clock.samples) == (1, 2, 2)


def test_where_the_caller_sets_the_boundary_each_backward_without_a_forward_is_a_micro_step():
    clock = Clock(accumulation=3, samples_per_micro_step=5, boundary=Boundary.FORCED)
    for _ in range(3):
        with clock.backward():
            pass
    clock.end_micro_step()
    clock.end_step(applied=True)
    assert (clock.micro_steps, clock.samples) == (3, 15)


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


COUNTERS = {"micro_steps": 6, "steps": 3, "applied_steps": 2, "skipped_steps": 1, "samples": 12, "weight_exponent": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": -7}, "steps = -7 must be a whole number"),
        ({"steps": 3.0}, "steps = 3.0 must be"),
        ({"samples": None}, "samples = None must be"),
        ({"samples": 2**60}, "samples = .* must be"),
        ({"micro_steps": True}, "micro_steps = True must be"),
        ({"steps": 4}, r"steps = 4 is not applied_steps \+ skipped_steps = 2 \+ 1"),
        ({"weight_exponent": 5000}, "weight_exponent = 5000 is not an exponent"),
        ({"weight_exponent": "x"}, "weight_exponent = 'x' is not an exponent"),
    ],
)
def test_a_counter_that_cannot_be_is_refused_and_nothing_has_moved(change, message):
    clock = Clock(accumulation=1, samples_per_micro_step=2)
    before = clock.state_dict()
    with pytest.raises(ValueError, match=message):
        clock.prepare_load({**COUNTERS, **change})
    commit = clock.prepare_load({key: value for key, value in COUNTERS.items() if key != "weight_exponent"})
    assert clock.state_dict() == before
    commit()
    assert clock.state_dict() == {**COUNTERS, "weight_exponent": before["weight_exponent"]}


def test_after_half_a_load_nothing_is_legal_but_another():
    clock = Clock(accumulation=2, samples_per_micro_step=1)
    clock.forward(with_grad=True)
    with pytest.raises(OSError, match="disk"), clock.loading("the load of x"):
        raise OSError("disk")
    refused = r"is not possible: the load of x failed \(OSError: disk\) after tensors had changed"
    calls = [
        lambda: clock.forward(with_grad=False),
        lambda: clock.backward().__enter__(),
        lambda: clock.batch().__enter__(),
        clock.end_micro_step,
        lambda: clock.require_open("save_checkpoint"),
    ]
    for call in calls:
        with pytest.raises(HalfLoaded, match=refused):
            call()
    clock.require_loadable("load_checkpoint")
    with clock.loading("the load of y"):
        pass
    assert one_micro_step(clock) is False
    clock.close()
    with pytest.raises(CallOrderError, match="closed"):
        clock.require_loadable("load_checkpoint")


def test_a_load_that_succeeds_leaves_the_position():
    clock = Clock(accumulation=2, samples_per_micro_step=1)
    one_micro_step(clock)
    clock.forward(with_grad=True)
    with clock.loading("weights"):
        assert clock.phase is Phase.HALF_LOADED
    assert (clock.phase, clock.index) == (Phase.FORWARD, 1)
    clock.begin_step()
    assert (clock.phase, clock.index) == (Phase.IDLE, 0)


def test_a_mixture_ends_with_the_load_of_all_that_was_mixed():
    clock, everything = Clock(accumulation=1, samples_per_micro_step=1), frozenset({"weights", "optimizer"})
    with pytest.raises(OSError, match="disk"), clock.loading("the load of a", everything):
        raise OSError("disk")
    for parts, is_whole in ((frozenset({"weights"}), True), (everything, False)):
        with clock.loading("the load of weights", parts, is_whole=is_whole):
            pass
        with pytest.raises(HalfLoaded, match="the load of a failed"):
            clock.forward(with_grad=True)
    with clock.loading("the load of b", everything):
        pass
    clock.forward(with_grad=True)
    with clock.loading("engine.load_state_dict()", is_whole=False):  # nothing was mixed before: it may be partial
        pass
    assert clock.phase is Phase.FORWARD
