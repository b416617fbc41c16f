"""Batches across epochs, without end."""

from itertools import chain, islice

import pytest

from zengine.data import RepeatingLoader, forever, make_loader


def loader_of():
    return make_loader(list(range(6)), micro_batch_size=2, rank=0, world_size=1, seed=0, drop_last=True)


def test_forever_goes_through_the_epochs():
    loader = loader_of()
    batches = [batch.tolist() for batch in islice(forever(loader), 9)]
    assert loader.epoch == 3
    for epoch in range(3):
        assert sorted(chain.from_iterable(batches[3 * epoch : 3 * epoch + 3])) == list(range(6))
    assert batches[:3] != batches[3:6]


def test_a_position_loaded_in_the_middle_is_followed():
    loader = loader_of()
    batches = forever(loader)
    state = loader.state_dict()
    first = [next(batches).tolist() for _ in range(5)]
    loader.load_state_dict(state)
    assert [next(batches).tolist() for _ in range(5)] == first


def test_any_iterable_is_repeated_and_has_its_length():
    repeated = RepeatingLoader([1, 2])
    assert len(repeated) == 2
    assert list(islice(repeated, 5)) == [1, 2, 1, 2, 1]


@pytest.mark.parametrize("source", [[], iter([1])])
def test_a_source_that_yields_nothing_more_is_an_error_not_an_endless_loop(source):
    repeated = forever(source)
    with pytest.raises(ValueError, match="yields no batch when iterated again"):
        list(islice(repeated, 3))
