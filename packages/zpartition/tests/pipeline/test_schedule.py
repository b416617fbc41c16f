import pytest

from zpartition.pipeline import Schedule, ScheduleError, make_schedule, one_f_one_b


def test_text_and_back() -> None:
    made = one_f_one_b(2, 3)
    assert made.text() == "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2"
    again = Schedule.parse("# by hand\n" + made.text() + "  # the last rank\n\n")
    assert again.ranks == made.ranks
    assert (again.stages, again.micro_batches) == (2, 3)


def test_stages_are_assigned_round_robin() -> None:
    made = make_schedule("interleaved", 2, 4, 2)
    assert [made.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    assert [list(made.stages_of(rank)) for rank in range(2)] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "holds no action"),
        ("0F0 1F0 1B0 0B0\n0F1 0B1", r"rank 0 has 1F0, but holds stages 0 of"),
        ("0F0 0B0\n1F0", r"stage 1, micro-batch 0: the schedule has F; it needs one F, and one B or I and W"),
        ("0F0 0B0 0W0\n1F0 1B0", r"stage 0, micro-batch 0: the schedule has FBW"),
        ("0F0 0F0 0B0\n1F0 1B0", "rank 0 has 0F0 twice"),
        ("0F0 0B0\n1F0 1B0\n2F0 2B0\n3F0 3B0\n", ""),
        ("0F0 0B0 2F0 2B0\n1F0 1B0", r"3 stages on 2 ranks"),
        (
            "0B0 0F0\n1F0 1B0",
            r"deadlocks: rank 0 at 0B0 waits for the forward of 0 at stage 0; rank 1 at 1F0 waits",
        ),
        ("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1", r"deadlocks: .*rank 1 at 1F1 waits for the forward of 1 at stage 0"),
    ],
)
def test_invalid_schedules_raise_before_a_run(text: str, problem: str) -> None:
    if not problem:
        Schedule.parse(text)
        return
    with pytest.raises(ScheduleError, match=problem):
        Schedule.parse(text)


def test_turns_show_waiting_ranks() -> None:
    turns = [[str(each) if each else "." for each in turn] for turn in one_f_one_b(2, 1).turns()]
    assert turns == [["0F0", "."], [".", "1F0"], [".", "1B0"], ["0B0", "."]]
