"""Batches by tokens: by hand, and what holds for any lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zengine.data import MetricError, PackedOrder, Packing, PickingOrder


def order_of(lengths, replicas=1, accumulation=1, drop_last=True, **packing) -> PackedOrder:
    return PackedOrder(
        lengths=np.array(lengths),
        packing=Packing(**packing),
        replicas=replicas,
        accumulation=accumulation,
        seed=1,
        drop_last=drop_last,
    )


def test_micro_batches_by_hand() -> None:
    """Lengths 3 4 5 | 9 | 2 2 2 2 | 12, limit 12; 13 is too long; at most 4 samples."""
    order = order_of([3, 4, 5, 9, 13, 2, 2, 2, 2, 12], max_tokens=12, max_batch_size=3)
    assert order.micro_batches(0) == [(0, 1, 2), (3, 5), (6, 7, 8), (9,)]
    assert order.num_too_long == 1
    assert order_of([3, 4, 5, 9, 12], max_tokens=12, min_batch_size=2).micro_batches(0) == [(0, 1, 2)]


def test_a_whole_number_of_steps_is_made_by_leaving_out_or_filling_up() -> None:
    lengths = [4] * 10  # five micro-batches of two
    assert len(order_of(lengths, 2, 2, max_tokens=8).micro_batches(0)) == 4
    filled = order_of(lengths, 2, 2, drop_last=False, max_tokens=8).micro_batches(0)
    assert len(filled) == 8
    assert filled[5:] == filled[:3]


def test_too_little_for_a_step_is_refused_with_the_numbers() -> None:
    with pytest.raises(MetricError, match=r"3 samples make 1 micro-batches .*1 samples exceed.* 2 replicas"):
        order_of([4, 4, 99], 2, max_tokens=8).micro_batches(0)


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"max_tokens": 4, "min_batch_size": 3, "max_batch_size": 2}])
def test_limits_that_exclude_each_other_are_refused(options) -> None:
    with pytest.raises(ValueError, match="max_batch_size"):
        Packing(**options)


def test_orders_differ_in_what_they_put_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200)

    def padded(picking: PickingOrder) -> int:
        batches = order_of(lengths, max_tokens=60, picking=picking).micro_batches(0)
        return sum(len(batch) * max(lengths[list(batch)]) for batch in batches)

    assert padded(PickingOrder.SEQLEN) < 1.1 * lengths.sum() < padded(PickingOrder.RANDOM)
    by_length = order_of(lengths, 2, 2, max_tokens=60, picking=PickingOrder.SEQLEN)
    assert by_length.micro_batches(0) != by_length.micro_batches(1)
    assert sorted(by_length.micro_batches(0)) == sorted(by_length.micro_batches(1))
    shuffled = order_of(lengths, max_tokens=60, picking=PickingOrder.RANDOM)
    assert shuffled.micro_batches(0) != shuffled.micro_batches(1)
    plain = order_of(lengths, max_tokens=60)
    assert plain.micro_batches(0) == plain.micro_batches(1)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=20, max_size=60),
    picking=st.sampled_from(PickingOrder),
    replicas=st.integers(1, 3),
    epoch=st.integers(0, 3),
)
def test_no_micro_batch_is_too_large_and_no_sample_comes_twice(lengths, picking, replicas, epoch) -> None:
    order = order_of(lengths, replicas, max_tokens=20, max_batch_size=5, picking=picking)
    batches = order.micro_batches(epoch)
    assert len(batches) % replicas == 0
    assert all(sum(lengths[sample] for sample in batch) <= 20 and 1 <= len(batch) <= 5 for batch in batches)
    samples = [sample for batch in batches for sample in batch]
    assert len(samples) == len(set(samples))
