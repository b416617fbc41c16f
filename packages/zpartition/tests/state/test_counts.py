"""Counters of a shard's parameters: one number while they agree, columns otherwise."""

from __future__ import annotations

import pytest
import torch

from zpartition.state.counts import (
    ALIKE,
    begin,
    is_column,
    is_large,
    labels_of,
    merged_columns,
    number_of,
    numbers_after,
    stack_column,
)


def of(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def test_numbers_that_agree_are_one() -> None:
    found = merged_columns({"step": of(3, 3), "name": ["x", "x"]}, [True, True])
    assert found == {"step": torch.tensor(3.0), "name": "x"}
    assert found["step"].dim() == 0


def test_numbers_that_differ_are_columns_with_labels_and_what_has_none_has_label_0() -> None:
    found = merged_columns({"step": of(3, 5, 3, 0)}, [True, True, True, False])
    assert found["step"].tolist() == [3, 5, 3, 0]
    assert labels_of(found, 4) == [1, 2, 1, 0]
    assert [float(number_of(found, "step", index, 4)) for index in range(4)] == [3, 5, 3, 0]


def test_without_any_number_it_still_matters_what_has_state() -> None:
    assert merged_columns({}, [True, True]) == {}
    assert labels_of(merged_columns({}, [True, False]), 2) == [1, 0]
    assert labels_of({}, 2) == [0, 0]
    assert labels_of({"momentum_buffer": torch.zeros(1024)}, 2) == [1, 1]


def test_what_was_updated_has_its_new_numbers_and_the_others_their_old_ones() -> None:
    first = numbers_after({}, [{"step": of(1)[0]}, {}, {}], [True, False, False])
    assert (first["step"].tolist(), labels_of(first, 3)) == ([1, 0, 0], [1, 0, 0])
    second = numbers_after(first, [{"step": of(2)[0]}, {"step": of(1)[0]}, {}], [True, True, False])
    assert (second["step"].tolist(), labels_of(second, 3)) == ([2, 1, 0], [1, 2, 0])
    assert first["step"].tolist() == [1, 0, 0], "whoever has kept them can put them back"


def test_equal_counts_do_not_make_equal_histories() -> None:
    """A step that the device has skipped is counted by nobody, and the host does not know."""
    before = {"step": torch.tensor(4.0)}
    apart = numbers_after(before, [{"step": torch.tensor(5.0)}, {}], [True, False])
    again = numbers_after(apart, [{}, {"step": torch.tensor(5.0)}], [False, True])
    assert again["step"].tolist() == [5, 5]
    assert len(set(labels_of(again, 2))) == 2


def test_numbers_that_are_no_tensors_are_kept_as_they_are() -> None:
    found = numbers_after({"step": 7, "exp_avg": torch.zeros(1024)}, [{"step": 8}, {}], [True, False])
    assert found["step"] == [8, 7]
    assert (number_of(found, "step", 0, 2), number_of(found, "step", 1, 2)) == (8, 7)
    assert "exp_avg" not in found


def test_a_tensor_of_several_numbers_is_no_number() -> None:
    with pytest.raises(ValueError, match=r"shape \(2,\), neither a number nor a value for each element"):
        stack_column([torch.zeros(()), torch.zeros(2)])
    assert stack_column([None, torch.ones(())]).tolist() == [0, 1]
    assert stack_column([None, None]) == [None, None]


def test_what_is_large_and_what_is_a_column() -> None:
    assert is_large("exp_avg", torch.zeros(1024))
    assert not is_large("step", torch.zeros(4))
    assert not is_large("exp_avg", 3.0)
    assert is_column(torch.zeros(4), 4)
    assert is_column([1, 2], 2)
    assert not is_column(torch.zeros(1024), 4)


def test_what_somebody_sets_is_kept_from_then_on() -> None:
    state = {"step": of(2, 0), ALIKE: torch.tensor([1, 0])}
    begin(state, 1)
    assert labels_of(state, 2) == [1, 2]
    begin(state, 0)
    assert labels_of(state, 2) == [1, 2]
    begin({"step": torch.tensor(1.0)}, 0)  # all have had the same updates
