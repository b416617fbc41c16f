"""Activations that several layers read come in once, and are not kept."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from zpartition.cells import Cell
from zpartition.tensor.entrance import Entrance


def two() -> Entrance:
    """Of two ranks; nothing is sent in these tests."""
    return Entrance(Cell(None, 2, 0))


def test_the_same_tensor_is_copied_once_until_it_changes() -> None:
    entrance, x = two(), torch.ones(3, requires_grad=True) * 1
    first = entrance.enter(x)
    assert entrance.enter(x) is first
    x += 1
    assert entrance.enter(x) is not first


def test_another_tensor_is_copied_and_nothing_without_gradients() -> None:
    entrance, x, y = two(), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first = entrance.enter(x)
    assert entrance.enter(y) is not first
    with torch.no_grad():
        assert entrance.enter(x) is x


def test_what_came_in_is_not_kept_alive() -> None:
    entrance, x = two(), torch.ones(3, requires_grad=True) * 1
    seen = weakref.ref(entrance.enter(x))
    assert seen() is not None
    del x
    assert seen() is None
    assert entrance.seen is None
    assert copy.deepcopy(entrance).seen is None


def test_edits_in_place_of_what_was_used_are_noticed_by_autograd() -> None:
    entrance, x = two(), torch.ones(3, requires_grad=True) * 1
    squares = entrance.enter(x).square().sum()
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
