"""Parameters to train, their dtypes and names."""

from __future__ import annotations

import torch
from torch import nn

import zoptim
from zcomm.testing import run_ranks
from zengine.build.trainable import dtype_of, dtypes_of, trainable_parameters, with_names
from zpartition.pipeline import LayerSpec, PipelineModule


def test_frozen_weights_may_be_trained_one_day_and_whole_numbers_never() -> None:
    model = nn.Linear(2, 2).requires_grad_(False)
    model.register_parameter("count", nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False))
    assert [tuple(param.shape) for param in trainable_parameters(model)] == [(2, 2), (2,)]


def test_names_are_given_to_parameters_and_groups_unless_one_is_a_stranger() -> None:
    model = nn.Linear(2, 2)
    assert [name for name, _ in with_names(model, list(model.parameters()))] == ["weight", "bias"]
    (group,) = with_names(model, [{"params": iter([model.bias]), "lr": 0.1}])
    assert (group["lr"], group["params"][0][0]) == (0.1, "bias")
    assert with_names(model, [nn.Parameter(torch.zeros(1))])[0].shape == (1,)


def test_a_group_of_nobody_goes_with_groups_that_have_names() -> None:
    """As on a stage of a pipeline that has norms alone: torch refuses groups with and without names."""
    model = nn.Linear(2, 2)
    groups = with_names(model, [{"params": [model.weight, model.bias]}, {"params": [], "lr": 0.2}])
    made = zoptim.AdamW(groups, lr=0.1)
    assert [(group["param_names"], group["lr"]) for group in made.param_groups] == [
        (["weight", "bias"], 0.1),
        ([], 0.2),
    ]


def test_the_dtypes_are_those_of_what_is_trained() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2).half().requires_grad_(False), nn.Linear(2, 2))
    assert dtypes_of(model) == {torch.float64: "0.bias", torch.float32: "2.bias"}
    assert dtype_of(model) == torch.float64
    assert dtype_of(nn.Tanh()) == torch.float32


def _of_a_stage() -> dict[torch.dtype, str]:
    layers = [LayerSpec(nn.Linear, 2, 2), torch.tanh, torch.tanh, torch.tanh]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    return dtypes_of(model.half())


def test_stages_of_a_pipeline_have_the_dtypes_of_all() -> None:
    """One of them has functions alone, and needs a loss scale like the other."""
    assert run_ranks(_of_a_stage, 2) == [{torch.float16: "layers.0.bias"}] * 2
