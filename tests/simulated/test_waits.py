"""Every wait, record and record_stream of the product is needed: without it, a scenario is out of order.

The mutants come from the syntax tree (simulated_cuda.mutants).  One that survives must be in `PROVED`, with the proof
that it orders nothing.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator

import pytest
from stream_scenarios import ALONE, BY_TRAINING, ON_RANKS, WORLD_SIZE, faults, scenarios_of

import zcomm
from simulated_cuda.mutants import Mutant, find_mutants, find_unused
from zcomm.testing import run_ranks

# Mutants that violate no order, and why.
PROVED = {
    "mover.CudaMover._begin_down: self.in_flight.popleft()[0].synchronize()": "bounds the memory of temporaries; the "
    "streams order the copies (test_mover.py counts the temporaries)",
    "mover.CudaMover._end_down: self.down.record_event()": "is what the line above waits for",
    "handles._Continuation.wait_for: self.handle.wait_for(seconds)": "bounds the time of the wait that follows",
    "handles._Continuation.wait_for: self.handle.wait_for(until_s - time.monotonic())": "the caller calls wait()",
    "instants.DeviceInstants.synchronize: self.last.pop().synchronize()": "one wait in the place of many: each "
    "interval waits for its own event",
    "trial_run.StepProfile.step_end: self.instants.synchronize()": "the same",
    "spans.Stopwatch.micro_ms: self._device.synchronize()": "the same",
    "spans.Stopwatch.total_ms: self._device.synchronize()": "the same",
    "exchange.Rounds.drop_pending: pending.handle.wait()": "nothing reads a dropped message; the process group holds "
    "its memory until it has arrived",
    "signals.Signals.step_end: run.parts.checkpoints.wait()": "waits for files of a background save, before the rank "
    "ends; no stream reads them",
}


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    with contextlib.closing(zcomm.init()):
        yield


def faults_of(mutant: Mutant) -> str:
    """Return the faults of the scenarios without a wait, of all ranks."""
    is_on_ranks, scenarios = scenarios_of(mutant)
    if not is_on_ranks:
        return faults(scenarios, mutant)
    try:
        return "\n".join(filter(None, run_ranks(faults, WORLD_SIZE, scenarios, mutant, timeout_s=10)))
    except Exception as error:
        return str(error)


@pytest.mark.usefixtures("world")
def test_the_scenarios_are_in_order() -> None:
    alone = dict.fromkeys((*itertools.chain(*ALONE.values()), *BY_TRAINING))
    assert faults(tuple(alone)) == ""


def test_the_scenarios_of_two_ranks_are_in_order() -> None:
    scenarios = tuple(dict.fromkeys(itertools.chain(*ON_RANKS.values())))
    assert run_ranks(faults, WORLD_SIZE, scenarios) == ["", ""]


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("mutant", find_mutants(), ids=str)
def test_without_a_wait_a_scenario_is_out_of_order(mutant: Mutant) -> None:
    found = faults_of(mutant)
    if str(mutant) in PROVED:
        assert found == "", f"{mutant} is needed: take it out of PROVED"
        return
    assert found, (
        f"nothing shows that {mutant} (line {mutant.line}) is missing: delete it, or prove that it orders nothing"
    )


def test_every_proof_is_of_a_mutant_and_every_exception_of_a_call() -> None:
    assert set(PROVED) <= {str(each) for each in find_mutants()}
    assert find_unused() == set()
