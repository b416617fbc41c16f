"""`deepspeed.compression.inference.quantization`: weights of a loaded model in few bits (ZeRO-Inference)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zengine.deepspeed.inference.quantization import read_quantization
from zengine.inference.quantized_modules import linear_weights, quantize_linears

__all__ = ["_init_group_wise_weight_quantization"]


def _init_group_wise_weight_quantization(model: nn.Module, ds_config: Mapping[str, Any]) -> nn.Module:
    """Quantize the linear layers that `weight_quantization.post_init_quant` names, in place; return `model`.

    ds_config: {"weight_quantization": {"post_init_quant": {part of a name: {"num_bits": 4, "group_size": 64,
    "group_dim": 1, "symmetric": false}}}}.

    Raises ValueError if the section is missing, a layer has two of the parts in its name, or no layer has one;
    Mismatch for other bits and groups.
    """
    patterns = (ds_config.get("weight_quantization") or {}).get("post_init_quant")
    if not patterns:
        raise ValueError(
            'weight_quantization.post_init_quant is missing: add {"name of a layer": {"num_bits": 4, "group_size": '
            '64, "group_dim": 1, "symmetric": false}}'
        )
    for name, *_ in linear_weights(model):
        if len(found := [part for part in patterns if part in name]) > 1:
            raise ValueError(
                f"weight_quantization.post_init_quant: {name!r} contains {found[0]!r} and {found[1]!r}; write names "
                "of which one fits"
            )
    quantization = read_quantization(torch.float32, {"weight": {"post_init_quant": patterns}})
    assert quantization is not None
    quantize_linears(model, quantization.format_of)
    return model
