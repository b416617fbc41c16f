"""Copies that are as large as what they hold."""

from __future__ import annotations

import collections

import torch

from zengine.deepspeed.checkpoint.utils import clone_tensors_for_torch_save


def test_views_become_tensors_of_their_own_size_in_the_same_structure():
    flat = torch.arange(100.0)
    given = collections.OrderedDict(a=flat[3:7].view(2, 2), b=[flat[:1], (5, "text")], tied=flat[3:7].view(2, 2))
    found = clone_tensors_for_torch_save(given)
    assert isinstance(found, collections.OrderedDict)
    assert torch.equal(found["a"], given["a"])
    assert found["a"].untyped_storage().nbytes() == 16
    assert found["a"].data_ptr() != given["a"].data_ptr()
    assert found["tied"] is found["a"]
    assert found["b"][1] == (5, "text")
    flat.zero_()
    assert found["a"].sum() == 18
