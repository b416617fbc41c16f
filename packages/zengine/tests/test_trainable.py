"""What an optimizer is made over."""

from __future__ import annotations

import torch
from torch import nn

from zengine.trainable import named, trainable


def test_frozen_weights_may_be_trained_one_day_and_whole_numbers_never() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    assert [tuple(param.shape) for param in trainable(model)] == [(2, 2), (2,)]


def test_names_are_given_to_parameters_and_groups_unless_one_is_a_stranger() -> None:
    model = nn.Linear(2, 2)
    assert [name for name, _ in named(model, list(model.parameters()))] == ["weight", "bias"]
    (group,) = named(model, [{"params": iter([model.bias]), "lr": 0.1}])
    assert (group["lr"], group["params"][0][0]) == (0.1, "bias")
    assert named(model, [nn.Parameter(torch.zeros(1))])[0].shape == (1,)
