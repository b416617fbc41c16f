"""ExpertParameter, the class of expert parameters."""

from __future__ import annotations

import copy

import torch
from torch.nn import Parameter

from zpartition.experts.stacked import ExpertParameter, mark_experts


def test_it_is_a_parameter_like_any_other() -> None:
    param = ExpertParameter(torch.ones(2, 3))
    assert isinstance(param, Parameter)
    assert type(param * 2) is torch.Tensor
    assert type(copy.deepcopy(param)) is ExpertParameter
    (param * 2).sum().backward()
    assert param.grad is not None
    module = torch.nn.Module()
    module.weight = param
    assert [name for name, _ in module.named_parameters()] == ["weight"]


def test_mark_experts_keeps_the_object() -> None:
    plain = Parameter(torch.ones(2))
    names = {plain: "w"}
    mark_experts(plain)
    assert isinstance(plain, ExpertParameter)
    assert names[plain] == "w"
    other = type("Coded", (Parameter,), {})(torch.ones(1))
    mark_experts(other)
    assert not isinstance(other, ExpertParameter)
