import pytest

from zpartition.pipeline import (
    ActionKind,
    Schedule,
    ScheduleError,
    gpipe,
    interleaved,
    make_schedule,
    one_f_one_b,
    simulate,
    zero_bubble,
)

SIZES = [(1, 1), (1, 4), (2, 1), (2, 4), (3, 7), (4, 4), (4, 16), (8, 16)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_bubbles_match_the_papers(ranks: int, micro_batches: int) -> None:
    theory = (ranks - 1) / micro_batches
    assert simulate(gpipe(ranks, micro_batches)).bubble == pytest.approx(theory)
    assert simulate(one_f_one_b(ranks, micro_batches)).bubble == pytest.approx(theory)
    if micro_batches >= ranks:
        assert simulate(zero_bubble(ranks, micro_batches)).bubble == pytest.approx(theory / 3)
    if micro_batches % ranks == 0:
        for stages in (2, 3):
            assert simulate(interleaved(ranks, micro_batches, stages)).bubble == pytest.approx(theory / stages)


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_memory_matches_the_papers(ranks: int, micro_batches: int) -> None:
    def kept(schedule: Schedule) -> list[int]:
        return [simulate(schedule).peak_kept(rank) for rank in range(ranks)]

    assert kept(gpipe(ranks, micro_batches)) == [micro_batches] * ranks
    assert kept(one_f_one_b(ranks, micro_batches)) == [min(ranks - rank, micro_batches) for rank in range(ranks)]
    assert max(kept(zero_bubble(ranks, micro_batches))) <= ranks
    if micro_batches % ranks == 0 and ranks > 1:
        warmup = [(ranks - rank - 1) * 2 + ranks for rank in range(ranks)]
        assert kept(interleaved(ranks, micro_batches, 2)) == [min(each + 1, 2 * micro_batches) for each in warmup]


def test_only_zero_bubble_splits_the_backward() -> None:
    kinds = {each.kind for actions in zero_bubble(2, 2).ranks for each in actions}
    assert kinds == {ActionKind.FORWARD, ActionKind.INPUT, ActionKind.WEIGHT}
    assert {each.kind for actions in gpipe(2, 2).ranks for each in actions} == {
        ActionKind.FORWARD,
        ActionKind.BACKWARD,
    }


def test_make_schedule_by_name() -> None:
    assert make_schedule("1f1b", 2, 4) == one_f_one_b(2, 4)
    assert make_schedule("interleaved", 2, 4, 2) == interleaved(2, 4, 2)
    assert make_schedule("interleaved", 2, 3, 1).name == "1f1b"
    with pytest.raises(ScheduleError, match="'2f2b'; choose one of 1f1b, gpipe, interleaved, zero_bubble"):
        make_schedule("2f2b", 2, 4)
    with pytest.raises(ScheduleError, match='one stage a rank, not 2; use "interleaved"'):
        make_schedule("gpipe", 2, 4, 2)
    with pytest.raises(
        ScheduleError, match="3 micro-batches with 2 stages a rank do not divide; choose a multiple of 2"
    ):
        make_schedule("interleaved", 2, 3, 2)
    with pytest.raises(ScheduleError, match="at least one rank and micro-batch, got 0 and 1"):
        make_schedule("gpipe", 0, 1)
