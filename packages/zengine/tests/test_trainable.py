"""What an optimizer is made over."""

from __future__ import annotations

import torch
from torch import nn

import zoptim
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


def test_a_group_of_nobody_goes_with_groups_that_have_names() -> None:
    """As on a stage of a pipeline that has norms alone: torch refuses groups with and without names."""
    model = nn.Linear(2, 2)
    groups = named(model, [{"params": [model.weight, model.bias]}, {"params": [], "lr": 0.2}])
    made = zoptim.AdamW(groups, lr=0.1)
    assert [(group["param_names"], group["lr"]) for group in made.param_groups] == [
        (["weight", "bias"], 0.1),
        ([], 0.2),
    ]
