import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zpartition.pipeline import LayerPartitionError, layer_weights, partition_balanced


def heaviest(weights: list[float], bounds: tuple[int, ...]) -> float:
    return max(sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_no_partition_is_better(values: list[int], data: st.DataObject) -> None:
    weights = [float(each) for each in values]
    stages = data.draw(st.integers(1, len(weights)))
    bounds = partition_balanced(weights, stages)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, len(weights), stages + 1)
    assert all(start < stop for start, stop in itertools.pairwise(bounds))
    every = ((0, *middle, len(weights)) for middle in itertools.combinations(range(1, len(weights)), stages - 1))
    assert heaviest(weights, bounds) == min(heaviest(weights, each) for each in every)


def test_many_layers_are_partitioned_too() -> None:
    weights = [1.0 + (number % 7) for number in range(1000)]
    assert heaviest(weights, partition_balanced(weights, 8)) < 1.02 * sum(weights) / 8


def test_equal_layers_are_partitioned_evenly() -> None:
    assert partition_balanced([1.0] * 8, 4) == (0, 2, 4, 6, 8)
    assert partition_balanced([5, 1, 1, 1, 1, 1], 2) == (0, 1, 6)
    with pytest.raises(LayerPartitionError, match=r"2 layers cannot be partitioned .* Use at most 2 stages"):
        partition_balanced([1.0, 1.0], 3)


def test_methods() -> None:
    numels, classes = [10, 0, 30], ["Embedding", "Dropout", "Block"]
    assert layer_weights("uniform", numels, classes) == [1, 1, 1]
    assert layer_weights("parameters", numels, classes) == layer_weights("best", numels, classes) == [10, 0, 30]
    assert layer_weights("best", [0, 0, 0], classes) == [1, 1, 1]
    assert layer_weights("type:block|embed", numels, classes) == [1, 0, 1]
    with pytest.raises(LayerPartitionError, match="matches no layer; their classes are Block, Dropout, Embedding"):
        layer_weights("type:attention", numels, classes)
    with pytest.raises(LayerPartitionError, match='write "uniform", "parameters", "type:REGEX" or "best"'):
        layer_weights("even", numels, classes)
