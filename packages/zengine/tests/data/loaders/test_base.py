"""What all loaders promise about iterations and positions."""

import pytest

from zengine.data import StaleIterationError, make_loader


def loader_of(samples=8, micro=2):
    return make_loader(
        list(range(samples)), micro_batch_size=micro, rank=0, world_size=1, seed=0, drop_last=True, shuffle=False
    )


def test_leaving_a_loop_and_iterating_again_continues_the_epoch():
    loader = loader_of()
    first = next(iter(loader)).tolist()
    rest = [batch.tolist() for batch in loader]
    assert [first, *rest] == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_an_older_iteration_refuses_to_go_on_beside_a_newer_one():
    loader = loader_of()
    older, newer = iter(loader), iter(loader)
    next(older)
    assert next(newer).tolist() == [2, 3]
    with pytest.raises(StaleIterationError, match="a newer one began"):
        next(older)
    assert next(newer).tolist() == [4, 5]


def test_an_iterator_made_but_not_begun_follows_a_position_loaded_before_its_first_batch():
    loader, batches = loader_of(), None
    batches = iter(loader)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 4})
    assert next(batches).tolist() == [4, 5]


def test_an_iteration_under_way_ends_when_a_position_is_loaded():
    loader = loader_of()
    batches = iter(loader)
    next(batches)
    loader.load_state_dict({**loader.state_dict(), "consumed_samples": 6})
    with pytest.raises(StaleIterationError, match=r"iter\(loader\) again"):
        next(batches)
    assert [batch.tolist() for batch in loader] == [[6, 7]]


def test_a_sample_that_cannot_be_read_raises_its_own_error_and_is_not_counted():
    class Broken(list):
        def __getitem__(self, index):
            if index == 2 and not fixed:
                raise OSError("disk gone")
            return index

    fixed = []
    loader = make_loader(
        Broken(range(6)), micro_batch_size=2, rank=0, world_size=1, seed=0, drop_last=True, shuffle=False
    )
    batches = iter(loader)
    next(batches)
    with pytest.raises(OSError, match="disk gone"):
        next(batches)
    fixed.append(True)
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5]]


@pytest.mark.parametrize("value", [None, -1, 1.5, "3", True])
def test_a_state_with_a_bad_number_is_refused_and_changes_nothing(value):
    loader = loader_of()
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(ValueError, match=r"epoch must be an integer in 0.*the state has seed"):
        loader.load_state_dict({**before, "epoch": value})
    assert loader.state_dict() == before
