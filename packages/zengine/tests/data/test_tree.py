"""Nests of tensors."""

from __future__ import annotations

from collections import UserDict, namedtuple

import torch

from zengine.data.tree import iter_tensors, map_tensors, named_tensors

Pair = namedtuple("Pair", "left right")


def test_every_kind_of_nest_keeps_its_kind() -> None:
    one = torch.ones(1)
    nest = {"a": [one, (one, "text")], "b": Pair(one, None), "c": UserDict(d=one)}
    twice = map_tensors(nest, lambda tensor: tensor * 2)
    assert twice == {"a": [one * 2, (one * 2, "text")], "b": Pair(one * 2, None), "c": UserDict(d=one * 2)}
    assert type(twice["b"]) is Pair
    assert type(twice["c"]) is UserDict
    assert len(list(iter_tensors(nest))) == 4
    assert nest["c"]["d"] is one


def test_tensors_of_a_nest_have_names() -> None:
    one = torch.ones(1)
    nest = {"a": [one, (one, "text")], "b": Pair(one, None), "c": UserDict(d=one)}
    assert [name for name, _ in named_tensors(nest, "x")] == ["x['a'][0]", "x['a'][1][0]", "x['b'][0]", "x['c']['d']"]
    assert list(named_tensors(one, "x")) == [("x", one)]
    assert not list(named_tensors("text", "x"))
