import pickle

import pytest

import zckpt
from zckpt.errors import error_class

KINDS = [each for each in vars(zckpt).values() if isinstance(each, type) and issubclass(each, zckpt.CheckpointError)]


@pytest.mark.parametrize("kind", KINDS)
def test_an_ordinary_except_catches_it_and_it_travels_by_name_and_by_pickle(kind: type) -> None:
    assert issubclass(kind, Exception)
    assert error_class(kind.__name__) is kind
    again = pickle.loads(pickle.dumps(kind("text", rank=3, path="p")))
    assert (str(again), again.rank, again.path) == ("text", 3, "p")


def test_an_unknown_name_is_the_base() -> None:
    assert error_class("SomethingNewer") is zckpt.CheckpointError
