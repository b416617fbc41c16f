"""The walk of a curriculum: what it admits, in which order, and that nothing comes twice in a pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zengine.data import (
    CurriculumOrder,
    Custom,
    DifficultyType,
    FixedDiscrete,
    FixedRoot,
    Limit,
    MetricError,
    MetricIndex,
    Order,
)
from zengine.data.order.curriculum import Permutations, Position, with_schedules

METRIC = [7, 1, 5, 3, 9, 2, 8, 4, 6, 10]  # of samples 0..9


def walk_of(*limits: Limit, stride: int = 2, accumulation: int = 1, num_samples: int = 10) -> CurriculumOrder:
    order = Order(num_samples=num_samples, micro_batch_size=stride, seed=3)
    return CurriculumOrder(base=order, limits=limits, accumulation=accumulation)


def limit_of(schedule, by=DifficultyType.VALUE, metric=METRIC, parts=100, name="metric") -> Limit:
    return Limit.make(schedule, by, MetricIndex.of(metric, name), parts)


def taken(walk: CurriculumOrder, count: int, start: Position | None = None) -> tuple[list[list[int]], Position]:
    position, batches, permutations = start or Position(), [], Permutations(walk.base)
    for _ in range(count):
        indices, position = walk.advance(position, permutations)
        batches.append(indices.tolist())
    return batches, position


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def test_without_limits_the_walk_is_the_plain_order() -> None:
    walk = walk_of()
    batches, position = taken(walk, 5)
    assert flat(batches) == walk.base.permutation(0).tolist()
    assert (position.epoch, position.place, position.step) == (1, 0, 5)


def test_a_value_holds_back_what_is_above_it_until_its_step() -> None:
    """Steps 1 and 2 have difficulty 4 (samples 1, 3, 5, 7), later ones 10 (all)."""
    walk = walk_of(limit_of(FixedDiscrete(difficulties=(4, 10), until=(2,))))
    batches, _ = taken(walk, 3)
    easy = [sample for sample in walk.base.permutation(0).tolist() if METRIC[sample] <= 4]
    assert flat(batches[:2]) == easy
    permutation = walk.base.permutation(0).tolist()
    behind = permutation[permutation.index(easy[-1]) + 1 :] + walk.base.permutation(1).tolist()
    assert batches[2] == behind[:2]


def test_a_percentile_admits_the_easiest_part() -> None:
    """3 of 10 parts of ten samples: those with metrics 1, 2, 3."""
    walk = walk_of(limit_of(FixedRoot(low=3, high=10, steps=1000), DifficultyType.PERCENTILE, parts=10), stride=3)
    batches, _ = taken(walk, 1)
    assert sorted(METRIC[sample] for sample in batches[0]) == [1, 2, 3]


def test_several_metrics_admit_what_all_admit_and_a_single_cluster_holds_nothing_back() -> None:
    other = [value % 2 for value in range(10)]
    always = FixedDiscrete(difficulties=(5,), until=())
    easy = limit_of(always)
    even = limit_of(FixedDiscrete(difficulties=(0,), until=()), metric=other, name="even")
    shown = limit_of(FixedDiscrete(difficulties=(1,), until=()), DifficultyType.SINGLE_CLUSTER, name="shown")
    batches, _ = taken(walk_of(easy, even, shown, stride=1), 1)
    assert METRIC[batches[0][0]] <= 5
    assert batches[0][0] % 2 == 0
    assert walk_of(easy, even, shown).difficulties(0) == {"metric": 5, "even": 0, "shown": 1}


def test_micro_steps_of_a_step_share_its_difficulty() -> None:
    law = FixedDiscrete(difficulties=(2, 10), until=(1,))
    _, position = taken(walk_of(limit_of(law), stride=1, accumulation=2), 3)
    assert (position.step, position.micro_step) == (1, 1)
    batches, _ = taken(walk_of(limit_of(law), stride=1, accumulation=2), 2)
    assert sorted(METRIC[sample] for batch in batches for sample in batch) == [1, 2]


def test_fewer_admitted_samples_than_a_batch_repeat_and_none_is_an_error() -> None:
    few = walk_of(limit_of(FixedDiscrete(difficulties=(2,), until=())), stride=5)
    batches, position = taken(few, 1)
    assert sorted(set(batches[0])) == [1, 5]
    assert position.epoch == 2
    none = walk_of(limit_of(FixedDiscrete(difficulties=(0,), until=())))
    with pytest.raises(MetricError, match=r"metric <= 0 \(admits 0 of 10; the smallest is 1\)"):
        taken(none, 1)
    with pytest.raises(MetricError, match="the limits of curriculum step 1 admit no sample"):
        none.advance(Position(place=4), Permutations(none.base))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 30), stride=st.integers(1, 7), stop=st.integers(0, 12))
def test_no_sample_comes_twice_in_a_pass_and_a_walk_goes_on_from_any_position(seed, steps, stride, stop) -> None:
    metric = np.random.default_rng(seed).integers(0, 50, 40)
    law = FixedRoot(low=max(int(metric.min()), 1) + 5, high=50, steps=steps)
    walk = CurriculumOrder(
        base=Order(num_samples=40, micro_batch_size=stride, seed=seed),
        limits=(Limit.make(law, DifficultyType.VALUE, MetricIndex.of(metric)),),
        accumulation=2,
    )
    permutations, position, by_pass, batches = Permutations(walk.base), Position(), {}, []
    positions = []
    for _ in range(20):
        positions.append(position)
        step = position.step
        indices, after = walk.advance(position, permutations)
        batches.append(indices.tolist())
        assert (metric[indices] <= law.at(step + 1)).all()
        if after.epoch == position.epoch:
            by_pass.setdefault(position.epoch, []).extend(indices.tolist())
        position = after
    assert all(len(samples) == len(set(samples)) for samples in by_pass.values())
    assert taken(walk, 20 - stop, positions[stop])[0] == batches[stop:]


def test_schedules_can_be_replaced() -> None:
    (limit,) = with_schedules(
        (limit_of(Custom(low=1, high=9)),), {"metric": FixedDiscrete(difficulties=(2,), until=())}
    )
    assert limit.count(limit.schedule.at(0)) == 2
