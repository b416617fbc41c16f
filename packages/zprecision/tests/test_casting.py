"""Nested values and tensors in place (arguments of modules: test_policy.py)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch

from zprecision.casting import cast, cast_in_place


class Output(OrderedDict[str, Any]):
    """A dict like the outputs of Transformers, which reject update()."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("use __setitem__")


def test_a_dictionary_that_rejects_update_is_cast_too() -> None:
    given = Output()
    given["logits"] = torch.ones(2)
    narrow = cast(given, torch.bfloat16)
    assert type(narrow) is Output
    assert (narrow["logits"].dtype, given["logits"].dtype) == (torch.bfloat16, torch.float32)


def test_casting_in_place_keeps_the_object_and_casts_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()
    same = weight
    cast_in_place(weight, torch.float16)
    assert weight is same
    assert weight.grad is not None
    assert (weight.dtype, weight.grad.dtype, weight.requires_grad) == (torch.float16, torch.float16, True)
