"""DeepSpeed-Chat's LoRA: layers are replaced by their names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zengine.deepspeed.compression.helper import (
    get_module_name,
    is_module_compressible,
    recursive_getattr,
    recursive_setattr,
)


class LoRA(nn.Module):
    """DeepSpeed-Chat's LinearLayer_LoRA."""

    def __init__(self, weight: nn.Parameter, rank: int, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias = weight, bias
        self.lora_right_weight = nn.Parameter(torch.randn(weight.shape[1], rank))
        self.lora_left_weight = nn.Parameter(torch.zeros(rank, weight.shape[0]))
        self.weight.requires_grad = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = x @ self.lora_right_weight @ self.lora_left_weight
        return nn.functional.linear(x, self.weight, self.bias) + low


def test_layers_are_replaced_as_in_deepspeed_chat() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    want = model(x)
    for name in [name for name, child in model.named_modules() if isinstance(child, nn.Linear)]:
        layer = recursive_getattr(model, name)
        recursive_setattr(model, name, LoRA(layer.weight, 2, layer.bias))
    assert isinstance(model[0][0], LoRA)
    torch.testing.assert_close(model(x), want)
    assert recursive_getattr(model, "0.0.weight") is model[0][0].weight
    with pytest.raises(AttributeError):
        recursive_getattr(model, "0.7.weight")


def test_layers_are_listed_by_pattern() -> None:
    model = nn.ModuleDict({"attention": nn.Linear(2, 2), "norm": nn.LayerNorm(2), "output": nn.Linear(2, 2)})
    assert not is_module_compressible(model["norm"])
    found, known = get_module_name("wq1", model, "attention", set())
    assert (found, known) == (["attention"], {"attention"})
    with pytest.raises(ValueError, match=r"attention match '.' of wq2, and belong to another group"):
        get_module_name("wq2", model, ".", known)
