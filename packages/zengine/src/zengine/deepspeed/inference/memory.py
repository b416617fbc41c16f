"""Memory of an inference engine, before it is allocated: does a sequence of `min_out_tokens` fit?

    weights in their new dtype or format + keys and values of one sequence

Bytes of the module that lie on the device already count as available: casting and quantizing free them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs
import torch
from torch import nn

from zengine.deepspeed.inference.quantization import WeightQuantization
from zengine.inference.experts.separate import stacks_in
from zengine.inference.quantized_modules import QuantizedLinear, linear_weights
from zpartition import expert_ranks_of
from zprecision.quant import Format, Int4, Int8

__all__ = ["InferenceMemory", "check_min_tokens", "estimate"]


@attrs.frozen(kw_only=True)
class InferenceMemory:
    """Bytes of one rank."""

    weights_bytes: int
    token_bytes: int  # of keys and values of one token in all layers; 0: unknown

    def bytes_of(self, num_tokens: int) -> int:
        """Return the bytes of the weights and of one sequence."""
        return self.weights_bytes + num_tokens * self.token_bytes

    def most_tokens(self, available_bytes: int) -> int:
        """Return the tokens of the longest sequence that fits."""
        return max(0, available_bytes - self.weights_bytes) // max(1, self.token_bytes)


def estimate(
    module: nn.Module,
    dtype: torch.dtype,
    quantization: WeightQuantization | None,
    num_ranks: int = 1,
    expert_ranks: int = 1,
) -> InferenceMemory:
    """Return the bytes of `module`, whole, perhaps on the meta device, after casting and quantizing.

    num_ranks: tensor ranks that share weights and heads about equally.  expert_ranks: that share the experts.
    """
    formats = {} if quantization is None else _formats(module, quantization)
    shared = {id(param) for each in _whole_experts(module) for param in each.parameters()}
    total = 0.0
    for tensor in (*module.parameters(), *module.buffers()):
        format = formats.get(id(tensor))
        itemsize = dtype.itemsize if tensor.is_floating_point() else tensor.dtype.itemsize
        nbytes = tensor.numel() * (itemsize if format is None else _bits(format) / 8)
        total += nbytes / (expert_ranks if expert_ranks > 1 and id(tensor) in shared else num_ranks)
    total += sum(each.weight.nbytes for each in module.modules() if isinstance(each, QuantizedLinear)) / num_ranks
    return InferenceMemory(weights_bytes=int(total), token_bytes=int(_kv_numel(module) * dtype.itemsize / num_ranks))


def check_min_tokens(
    needed: InferenceMemory, module: nn.Module, device: torch.device, min_tokens: int, available_bytes: int
) -> None:
    """Raise RuntimeError if the weights and a sequence of `min_tokens` do not fit into the device's memory."""
    held = sum(each.nbytes for each in (*module.parameters(), *module.buffers()) if each.device.type == device.type)
    room = available_bytes + held
    if needed.bytes_of(min_tokens) <= room:
        return
    fits = needed.most_tokens(room)
    advice = (
        f"at most {fits:,} tokens fit: lower min_out_tokens"
        if fits
        else "the weights alone do not fit: quantize them (dtype='int8', or quant={'weight': {'num_bits': 4}}), "
        "split them (tensor_parallel), or stream them (zero={'stage': 3, 'offload_param': {'device': 'nvme', ...}})"
    )
    raise RuntimeError(
        f"min_out_tokens = {min_tokens:,} does not fit into the memory of {device}: weights "
        f"{needed.weights_bytes:,} bytes, keys and values {min_tokens * needed.token_bytes:,}, available {room:,}; "
        f"{advice}."
    )


def _whole_experts(module: nn.Module) -> Iterable[nn.Module]:
    """Return the stacks and lists of experts of which each rank will hold a part; none if it does already."""
    from zpartition import experts

    return () if expert_ranks_of(module).size > 1 else experts.find_experts(module).values()


def _formats(module: nn.Module, quantization: WeightQuantization) -> dict[int, Format]:
    """Return the format of each linear layer's weight, by its identity."""
    found = {}
    for name, layer, _ in linear_weights(module):
        format = quantization.format_of(name)
        if format is not None:
            found[id(layer.weight)] = format
    for name, experts, stack in stacks_in(module):
        for each in stack.names:
            format = quantization.format_of(f"{name}.{each}.0")
            if format is not None:
                found[id(getattr(experts, each))] = format
    return found


def _bits(format: Format) -> float:
    """Return the bits of a weight; a group has one scale of 16 bits, and perhaps a minimum."""
    if not isinstance(format, Int4 | Int8):
        return 8.5
    bits, scales = (4 if isinstance(format, Int4) else 8), 2 if format.scale == "minmax" else 1
    return bits + (16 * scales / format.group if format.group else 0)


def _kv_numel(module: nn.Module) -> int:
    """Return the elements of keys and values of one token, by the model's config; 0 if it says nothing."""
    config: Any = getattr(module, "config", None)
    layers, heads = _number(config, "num_hidden_layers", "n_layer"), _number(config, "num_attention_heads", "n_head")
    width = _number(config, "hidden_size", "n_embd")
    if not (layers and heads and width):
        return 0
    size = _number(config, "head_dim") or width // heads
    return 2 * layers * (_number(config, "num_key_value_heads") or heads) * size


def _number(config: Any, *names: str) -> int:
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)
