"""The batch equation: all seven rows of the table, exact division, and messages that can be followed."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zengine.config.plan.batch import BatchTerms, Unsolvable, solve

SIZES = st.integers(1, 60)


def solution(train: int, micro: int, accumulation: int, replicas: int) -> tuple[int, int, int]:
    plan = solve(BatchTerms(train=train, micro=micro, accumulation=accumulation), replicas)
    assert plan.train_batch_size == plan.micro_batch_size * plan.accumulation * plan.replicas
    assert plan.replicas == replicas
    return plan.train_batch_size, plan.micro_batch_size, plan.accumulation


def message(train: int, micro: int, accumulation: int, replicas: int) -> str:
    with pytest.raises(Unsolvable) as caught:
        solution(train, micro, accumulation, replicas)
    return f"{caught.value.reason}. {caught.value.suggestion}"


@pytest.mark.parametrize(
    ("given_sizes", "replicas", "solved"),
    [
        pytest.param((32, 4, 2), 4, (32, 4, 2), id="all three"),
        pytest.param((32, 4, 0), 4, (32, 4, 2), id="train and micro"),
        pytest.param((32, 0, 2), 4, (32, 4, 2), id="train and accumulation"),
        pytest.param((0, 4, 2), 4, (32, 4, 2), id="micro and accumulation"),
        pytest.param((32, 0, 0), 4, (32, 8, 1), id="train only"),
        pytest.param((0, 4, 0), 4, (16, 4, 1), id="micro only"),
        pytest.param((1, 1, 1), 1, (1, 1, 1), id="one of everything"),
    ],
)
def test_each_row_of_the_table_has_its_solution(
    given_sizes: tuple[int, int, int], replicas: int, solved: tuple[int, int, int]
) -> None:
    assert solution(*given_sizes, replicas) == solved


@pytest.mark.parametrize("accumulation", [0, 4])
def test_without_train_and_micro_there_is_nothing_to_solve(accumulation: int) -> None:
    assert message(0, 0, accumulation, 2) == (
        "neither train_batch_size nor train_micro_batch_size_per_gpu is given. "
        'Add one of them, for example "train_micro_batch_size_per_gpu": 1.'
    )


@pytest.mark.parametrize(
    ("given_sizes", "replicas", "text"),
    [
        ((64, 4, 3), 4, "train_batch_size 64 = micro 4 x accumulation 3 x replicas 4 does not hold (48). "
         "Set accumulation to 4, or train_batch_size to 48."),
        ((12, 4, 2), 2, "train_batch_size 12 = micro 4 x accumulation 2 x replicas 2 does not hold (16). "
         "Set micro to 3, or train_batch_size to 16."),
        ((48, 4, 2), 3, "train_batch_size 48 = micro 4 x accumulation 2 x replicas 3 does not hold (24). "
         "Set accumulation to 4, or micro to 8, or train_batch_size to 24."),
        ((64, 6, 0), 4, "train_batch_size 64 = micro 6 x replicas 4 x accumulation does not hold for any whole "
         "accumulation (2.667). Nearest valid train_batch_size: 48 or 72. Or keep it with micro 4 or 8."),
        ((30, 0, 4), 1, "train_batch_size 30 = accumulation 4 x replicas 1 x micro does not hold for any whole "
         "micro (7.5). Nearest valid train_batch_size: 28 or 32. Or keep it with accumulation 3 or 5."),
        ((10, 0, 0), 4, "train_batch_size 10 = accumulation 1 x replicas 4 x micro does not hold for any whole "
         "micro (2.5). Nearest valid train_batch_size: 8 or 12."),
        ((2, 0, 0), 4, "train_batch_size 2 = accumulation 1 x replicas 4 x micro does not hold for any whole "
         "micro (0.5). Nearest valid train_batch_size: 4."),
        ((8, 6, 0), 2, "train_batch_size 8 = micro 6 x replicas 2 x accumulation does not hold for any whole "
         "accumulation (0.6667). Nearest valid train_batch_size: 12. Or keep it with micro 4."),
    ],
)  # fmt: skip
def test_an_equation_that_does_not_close_is_printed_with_what_would(
    given_sizes: tuple[int, int, int], replicas: int, text: str
) -> None:
    assert message(*given_sizes, replicas) == text


@given(micro=SIZES, accumulation=SIZES, replicas=SIZES)
def test_any_term_may_be_left_out_of_an_equation_that_holds(micro: int, accumulation: int, replicas: int) -> None:
    full = (micro * accumulation * replicas, micro, accumulation)
    train = full[0]
    assert solution(train, micro, accumulation, replicas) == full
    assert solution(train, micro, 0, replicas) == full
    assert solution(train, 0, accumulation, replicas) == full
    assert solution(0, micro, accumulation, replicas) == full


@given(train=st.integers(0, 500), micro=st.integers(0, 30), accumulation=st.integers(0, 30), replicas=SIZES)
def test_what_is_given_is_never_changed_and_every_advice_works(
    train: int, micro: int, accumulation: int, replicas: int
) -> None:
    try:
        solved = solution(train, micro, accumulation, replicas)
    except Unsolvable as unsolvable:
        for number in re.findall(r"(?:train_batch_size: |train_batch_size to |or )(\d+)", unsolvable.suggestion):
            if "Or keep" not in unsolvable.suggestion and f"micro to {number}" not in unsolvable.suggestion:
                assert solution(int(number), micro, accumulation, replicas)
        for number in re.findall(r"accumulation to (\d+)", unsolvable.suggestion):
            assert solution(train, micro, int(number), replicas)
        for number in re.findall(r"micro to (\d+)", unsolvable.suggestion):
            assert solution(train, int(number), accumulation, replicas)
        for name, numbers in re.findall(
            r"keep it with (micro|accumulation) (\d+(?: or \d+)?)", unsolvable.suggestion
        ):
            for number in numbers.split(" or "):
                changed = (int(number), accumulation) if name == "micro" else (micro, int(number))
                assert solution(train, *changed, replicas)
    else:
        for given_size, size in zip((train, micro, accumulation), solved):
            assert given_size in (0, size)


def test_a_batch_of_absurd_size_is_answered_at_once() -> None:
    assert "Nearest valid" in message(10**30 + 1, 2, 0, 1)
