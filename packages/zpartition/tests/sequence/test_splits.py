"""Splits hold every token once, and attention slices cover exactly what causality allows."""

from __future__ import annotations

import pytest
import torch

from zpartition.sequence.splits import Order, Split, attention_slice


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_ranks_have_every_token_once_and_join_them_in_order(order: Order, size: int) -> None:
    x = torch.arange(2 * 24 * 3).view(2, 24, 3)
    splits = [Split(size, rank, order) for rank in range(size)]
    parts = [split.take(x) for split in splits]
    assert torch.equal(splits[0].join(parts), x)
    for split, part in zip(splits, parts):
        assert torch.equal(part, x[:, split.positions(24)])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slices_cover_exactly_what_a_mask_allows(order: Order, size: int, is_causal: bool) -> None:
    length = 24
    seen = torch.zeros(length, length)
    for rank in range(size):
        mine = Split(size, rank, order).positions(length)
        for source in range(size):
            theirs = Split(size, source, order).positions(length)
            found = attention_slice(order, rank, source, length // size, is_causal=is_causal)
            if found:
                q, k = mine[found.query], theirs[found.key]
                block = torch.ones(len(q), len(k))
                seen[q.unsqueeze(1), k] += block.tril() if found.is_causal else block
    full = torch.ones(length, length)
    assert torch.equal(seen, full.tril() if is_causal else full)


def test_in_a_causal_zigzag_all_ranks_have_equal_work() -> None:
    def work(rank: int, source: int) -> int:
        found = attention_slice(Order.ZIGZAG, rank, source, 8, is_causal=True)
        return (found.query.stop - found.query.start) * (found.key.stop - found.key.start)

    assert {work(rank, source) for rank in range(4) for source in range(4) if rank != source} == {32}


def test_lengths_that_do_not_divide_raise_with_a_remedy() -> None:
    with pytest.raises(ValueError, match=r"input_ids: 10 tokens .* over 4 .*multiple of 8: pad by 6 to 16.*cut to 8"):
        Split(4, 0, Order.ZIGZAG).take(torch.zeros(1, 10), what="input_ids")
