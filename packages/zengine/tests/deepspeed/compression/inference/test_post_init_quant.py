"""ZeRO-Inference's quantization of a loaded model by parts of names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zengine.config import load
from zengine.deepspeed.compression.inference.quantization import _init_group_wise_weight_quantization
from zengine.inference.quantized_modules import QuantizedLinear
from zprecision import Int4, dequantize, quantize

FOUR = {"num_bits": 4, "group_size": 64, "group_dim": 1, "symmetric": False}


def model() -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict({"fc1": nn.Linear(64, 8), "fc2": nn.Linear(64, 8), "head": nn.Linear(64, 8)})


def test_named_layers_are_quantized() -> None:
    made, plain = model(), model()
    source = {"train_batch_size": 1, "weight_quantization": {"post_init_quant": {"fc": FOUR}}}
    assert _init_group_wise_weight_quantization(made, source) is made
    assert type(made["head"]) is nn.Linear
    for name in ("fc1", "fc2"):
        assert isinstance(made[name], QuantizedLinear)
        wanted = dequantize(quantize(plain[name].weight, Int4(group=64, scale="minmax")))
        assert torch.equal(dequantize(made[name].weight), wanted)
    assert any("post_init_quant" in notice for notice in load(source).notices)


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="post_init_quant is missing"):
        _init_group_wise_weight_quantization(model(), {})
    twice = {"weight_quantization": {"post_init_quant": {"fc": FOUR, "fc1": FOUR}}}
    with pytest.raises(ValueError, match="'fc1' contains 'fc' and 'fc1'"):
        _init_group_wise_weight_quantization(model(), twice)
