"""Uneven steps: shares cover the batch once, in order, and differ by one sample at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zengine.data.order.uneven import UnevenStep


@given(st.integers(1, 300), st.integers(1, 40), st.integers(1, 9))
def test_shares_cover_the_batch_once_and_in_order(batch: int, world: int, most: int) -> None:
    step = UnevenStep.within(batch, world, most)
    shares = [step.share(index, rank) for index in range(step.accumulation) for rank in range(world)]
    assert [sample for share in shares for sample in share] == list(range(batch))
    sizes = {len(share) for share in shares}
    assert max(sizes) == step.most <= most
    for index in range(step.accumulation):
        of_ranks = {len(step.share(index, rank)) for rank in range(world)}
        assert max(of_ranks) - min(of_ranks) <= 1
    assert sum(sum(step.factors(rank)) for rank in range(world)) == pytest.approx(world)


def test_an_even_step_weighs_every_mean_alike() -> None:
    step = UnevenStep.within(24, 3, 4)
    assert (step.accumulation, step.most, step.factors(1)) == (2, 4, (0.5, 0.5))
