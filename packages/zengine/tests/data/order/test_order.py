"""The order of samples: a permutation by (seed, epoch), cut the same way for every world."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zengine.data import Order


def read_by_all(order: Order, *, epoch: int = 0, consumed: int = 0, drop_last: bool = True) -> list[int]:
    """Samples in the order that the world reads them: micro-step by micro-step, rank by rank."""
    per_rank = [
        list(order.batches(rank, epoch=epoch, consumed=consumed, drop_last=drop_last))
        for rank in range(order.world_size)
    ]
    return list(chain.from_iterable(ticket.indices for step in zip(*per_rank, strict=True) for ticket in step))


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(40, 90),
    micro=st.integers(1, 5),
    world=st.integers(1, 4),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 5),
)
def test_all_ranks_together_read_the_permutation_of_the_epoch_whatever_the_world(
    num_samples, micro, world, seed, epoch
):
    order = Order(num_samples=num_samples, micro_batch_size=micro, world_size=world, seed=seed)
    permutation = order.permutation(epoch).tolist()
    assert sorted(permutation) == list(range(num_samples))
    whole = num_samples // (micro * world) * micro * world
    assert read_by_all(order, epoch=epoch) == permutation[:whole]


@settings(max_examples=60, deadline=None)
@given(num_samples=st.integers(12, 60), micro=st.integers(1, 3), world=st.integers(1, 4))
def test_without_drop_last_every_sample_is_read_and_the_rest_wraps_to_the_start(num_samples, micro, world):
    order = Order(num_samples=num_samples, micro_batch_size=micro, world_size=world, seed=3)
    permutation = order.permutation(0).tolist()
    read = read_by_all(order, drop_last=False)
    padding = len(read) - num_samples
    assert read == permutation + permutation[:padding]
    assert 0 <= padding < order.stride
    assert len(read) == order.stride * order.num_batches(drop_last=False)


@settings(max_examples=60, deadline=None)
@given(
    world=st.integers(1, 4),
    micro=st.integers(1, 4),
    new_world=st.integers(1, 4),
    new_micro=st.integers(1, 4),
    data=st.data(),
)
def test_another_world_goes_on_at_the_same_global_sample(world, micro, new_world, new_micro, data):
    before = Order(num_samples=50, micro_batch_size=micro, world_size=world, seed=9)
    after = Order(num_samples=50, micro_batch_size=new_micro, world_size=new_world, seed=9)
    consumed = before.stride * data.draw(st.integers(0, 50 // before.stride - 1))
    whole = (50 - consumed) // after.stride * after.stride
    assert read_by_all(after, consumed=consumed) == before.permutation(0).tolist()[consumed : consumed + whole]


def test_the_permutation_is_pinned_to_these_values_because_checkpoints_depend_on_it():
    order = Order(num_samples=8, micro_batch_size=1, seed=1234)
    assert order.permutation(0).tolist() == [7, 3, 0, 1, 4, 2, 5, 6]
    assert order.permutation(1).tolist() == [0, 5, 6, 4, 2, 1, 7, 3]


def test_epochs_and_seeds_shuffle_differently():
    order = Order(num_samples=100, micro_batch_size=1, seed=1)
    other = Order(num_samples=100, micro_batch_size=1, seed=2)
    orders = {tuple(o.permutation(epoch).tolist()) for o in (order, other) for epoch in range(3)}
    assert len(orders) == 6


def test_each_sample_is_equally_likely_in_each_place():
    counts = np.zeros((6, 6))
    order = Order(num_samples=6, micro_batch_size=1, seed=0)
    for epoch in range(3000):
        counts[np.arange(6), order.permutation(epoch)] += 1
    chi_square = ((counts - 500) ** 2 / 500).sum()
    assert chi_square < 60  # 25 degrees of freedom: 1e-4 of all seeds are above 60


def test_without_shuffle_every_epoch_is_in_the_order_of_the_dataset():
    order = Order(num_samples=5, micro_batch_size=1, shuffle=False)
    assert order.permutation(0).tolist() == order.permutation(7).tolist() == [0, 1, 2, 3, 4]


def test_a_dataset_below_one_micro_batch_of_all_ranks_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"has 7 samples.*micro_batch_size 4 x 2 ranks = 8"):
        Order(num_samples=7, micro_batch_size=4, world_size=2)


@pytest.mark.parametrize(
    ("field", "value"),
    [("micro_batch_size", 0), ("world_size", 0), ("seed", -1), ("micro_batch_size", 2.0), ("seed", True)],
)
def test_a_number_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} must be an integer >="):
        Order(**{"num_samples": 10, "micro_batch_size": 1, field: value})


def test_a_seed_beyond_64_bits_is_refused():
    with pytest.raises(ValueError, match="seed must be below"):
        Order(num_samples=10, micro_batch_size=1, seed=2**64)
