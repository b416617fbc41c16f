"""Error messages of shared-memory groups."""

from __future__ import annotations

import attrs
import pytest

from zcomm.shared.failure import CallSignature, FailureKind, FailureReport, describe
from zcomm.shared.native import OPS

DIED = FailureReport(FailureKind.DIED, rank=1, reporter=0, ticket=7, seconds=0.1, label="grad_bucket[3]")
REDUCE = CallSignature(OPS.index("all_reduce"), 0, 0, 0, 100, "grad_bucket[3]")


def message_of(report: FailureReport, ticket: int = 7) -> str:
    """Message on rank 0 of the group (rank 4 of the world)."""
    return describe(report, rank=0, ranks=(4, 5, 6), pids=(100, 101, 102), ticket=ticket)


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (DIED, "rank 5 (process 101) has died."),
        (attrs.evolve(DIED, reporter=2), "rank 5 (process 101) has died, reported by rank 6 (process 102)."),
        (
            attrs.evolve(DIED, kind=FailureKind.TIMED_OUT, seconds=60.0),
            "this rank waited 60.0 s for rank 5 (process 101), the time limit of the group.",
        ),
        (
            attrs.evolve(DIED, kind=FailureKind.TIMED_OUT, rank=0, reporter=2, seconds=60.0),
            "rank 6 (process 102) waited 60.0 s for this rank, the time limit of the group.",
        ),
        (attrs.evolve(DIED, kind=FailureKind.CLOSED), "rank 5 (process 101) has closed the group."),
        (attrs.evolve(DIED, kind=FailureKind.CLOSED, rank=0), "this rank has closed the group."),
        (
            attrs.evolve(DIED, kind=FailureKind.ELSEWHERE, reporter=1),
            "rank 5 (process 101) has lost its connection to the ranks on other hosts.",
        ),
        (
            attrs.evolve(DIED, kind=FailureKind.DISAGREE, reporter=1),
            "rank 5 (process 101) found that the calls of the ranks disagree.",
        ),
    ],
)
def test_a_failure_names_the_rank_in_the_world_and_its_process(report: FailureReport, text: str) -> None:
    assert message_of(report) == text


def test_calls_that_disagree_are_both_described() -> None:
    other = CallSignature(OPS.index("all_gather"), 2, -1, 0, 50, "unit[1]")
    report = attrs.evolve(DIED, kind=FailureKind.DISAGREE, first=REDUCE, second=other)
    assert message_of(report) == (
        "the ranks disagree: rank 4 calls all_reduce 'grad_bucket[3]' of 100 float32 (op 'sum'), "
        "rank 5 all_gather 'unit[1]' of 50 bfloat16 a rank."
    )


def test_a_later_call_names_the_first_failure() -> None:
    assert message_of(DIED, ticket=9).endswith("has died. The group is unusable since 'grad_bucket[3]'.")


def test_a_broadcast_shows_its_source_and_a_barrier_nothing() -> None:
    assert str(CallSignature(OPS.index("broadcast"), 0, -1, 2, 8, "")) == "broadcast of 8 float32 (source 2)"
    assert str(CallSignature(OPS.index("barrier"), -1, -1, 0, 0, "end")) == "barrier 'end'"


def test_slices_that_do_not_adjoin_are_described() -> None:
    scatter = OPS.index("reduce_scatter")
    assert str(CallSignature(scatter, 0, 0, 0, 8, "", 8)) == "reduce_scatter of 8 float32 a rank (op 'sum')"
    assert (
        str(CallSignature(scatter, 0, 0, 0, 8, "", 20)) == "reduce_scatter of 8 float32 a rank (20 apart, op 'sum')"
    )
