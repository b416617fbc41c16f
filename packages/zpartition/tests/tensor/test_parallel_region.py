"""Activations that several layers read are copied once, and not kept alive."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch

from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.tensor.parallel_region import ParallelRegion


def two() -> ParallelRegion:
    """A region of two ranks; these tests send nothing."""
    return ParallelRegion(ModelParallelGroup(None, 2, 0))


def test_the_same_tensor_is_copied_once_until_it_changes() -> None:
    parallel_region, x = two(), torch.ones(3, requires_grad=True) * 1
    first = parallel_region.enter(x)
    assert parallel_region.enter(x) is first
    x += 1
    assert parallel_region.enter(x) is not first


def test_another_tensor_is_copied_and_nothing_without_gradients() -> None:
    parallel_region, x, y = two(), torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    first = parallel_region.enter(x)
    assert parallel_region.enter(y) is not first
    with torch.no_grad():
        assert parallel_region.enter(x) is x


def test_entered_tensors_are_not_kept_alive() -> None:
    parallel_region, x = two(), torch.ones(3, requires_grad=True) * 1
    seen = weakref.ref(parallel_region.enter(x))
    assert seen() is not None
    del x
    assert seen() is None
    assert parallel_region.seen is None
    assert copy.deepcopy(parallel_region).seen is None


def test_autograd_detects_in_place_edits_of_entered_tensors() -> None:
    parallel_region, x = two(), torch.ones(3, requires_grad=True) * 1
    squares = parallel_region.enter(x).square().sum()
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()
