"""Labels are shifted and positions added before the split; joined pieces equal the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zpartition.sequence import Order, SequenceBatches, Split, shift_labels


def batch(seed: int, length: int, **more: Any) -> dict[str, Any]:
    ids = torch.arange(2 * length).view(2, length) + 100 * seed
    return {"input_ids": ids, "labels": ids.clone(), "name": f"batch {seed}", **more}


def pieces(order: Order, source: dict[str, Any], size: int = 2, **more: Any) -> list[dict[str, Any]]:
    return [SequenceBatches([], Split(size, rank, order), **more).piece(source) for rank in range(size)]


def test_labels_are_shifted_across_rank_boundaries() -> None:
    assert shift_labels(torch.tensor([[1, 2, 3]])).tolist() == [[2, 3, -100]]
    first, second = pieces(Order.CONTIGUOUS, batch(0, 4))
    assert first["input_ids"].tolist() == [[0, 1], [4, 5]]
    assert first["shift_labels"].tolist() == [[1, 2], [5, 6]]
    assert second["shift_labels"].tolist() == [[3, -100], [7, -100]]
    assert second["position_ids"].tolist() == [[2, 3], [2, 3]]
    assert "labels" not in first
    assert first["name"] == second["name"] == "batch 0"


@pytest.mark.parametrize("order", Order)
def test_joined_pieces_equal_the_batch(order: Order) -> None:
    packed = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2]] * 2)
    source = batch(0, 8, position_ids=packed, weights=torch.ones(2), features=torch.randn(2, 8, 3))
    found = pieces(order, source)
    for key in ("input_ids", "position_ids", "features"):
        assert torch.equal(Split(2, 0, order).join([piece[key] for piece in found]), source[key])
    assert torch.equal(found[1]["weights"], torch.ones(2))


def test_odd_lengths_are_padded_with_pad_id_and_raise_without() -> None:
    source = batch(0, 5, attention_mask=torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"5 tokens cannot be split over 2 sequence ranks.* pad by 1 to 6"):
        pieces(Order.CONTIGUOUS, source)
    _, second = pieces(Order.CONTIGUOUS, source, pad_id=7)
    assert second["input_ids"].tolist() == [[3, 4, 7], [8, 9, 7]]
    assert second["shift_labels"].tolist() == [[4, -100, -100], [9, -100, -100]]
    assert second["position_ids"].tolist() == [[3, 4, 5]] * 2
    assert second["attention_mask"].tolist() == [[1, 1, 0]] * 2


def test_batches_that_cannot_be_split_raise() -> None:
    with pytest.raises(ValueError, match=r"attention_mask of shape \[2, 1, 4, 4\].*position_ids"):
        pieces(Order.CONTIGUOUS, batch(0, 4, attention_mask=torch.ones(2, 1, 4, 4)))
    with pytest.raises(ValueError, match="the keys x: sequences are split by the tokens of input_ids"):
        pieces(Order.CONTIGUOUS, {"x": torch.ones(2, 4)})


def test_a_loader_of_equal_batches_is_split_without_messages() -> None:
    source = [batch(seed, 4) for seed in range(3)]
    batches = SequenceBatches.over(source)
    assert len(batches) == 3
    assert [each["input_ids"].shape for each in batches] == [(2, 4)] * 3
    assert len(list(batches)) == 3  # a second epoch
