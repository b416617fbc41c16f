"""Adapters switched off, and weights with their updates: what generation and reference log-probabilities need.

    with adapters_disabled(model):
        reference = log_probs(model(ids))          # of the frozen base
    for name, weight in merged_weights(model):     # one layer at a time
        fast.copy_(name, weight)

Everything works on a plain module and on the module of an engine, at every ZeRO stage; where weights are sharded, a
layer's are gathered for as long as it is merged, so every rank calls.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from zengine.adapters.foreign import adapted, base_of, is_switchable
from zengine.adapters.lora import LoRALinear, replace_layer
from zengine.adapters.quantized_base import QuantizedBase
from zengine.adapters.update import Adapted, merge, merge_scratch_bytes
from zpartition import gathered, is_gathered

__all__ = [
    "DenseSizes",
    "adapters_disabled",
    "computed_weight",
    "dense_sizes",
    "merge_lora",
    "merged_weight",
    "merged_weights",
    "without_adapters",
]


def merged_weight(layer: nn.Module) -> Tensor:
    """Return the weight that a layer with adapters computes with, (out, in): base + updates, rounded once.

    New memory, in the dtype of the base (a quantized one: of its adapter); the base is not changed.  Where the layer
    is sharded, a collective.  Raises ValueError for a layer without adapters.
    """
    found = adapted(layer)
    if found is None:
        raise ValueError(f"{type(layer).__name__} has no adapters, so nothing is merged: use its weight")
    return _merged(layer, found)


def computed_weight(layer: nn.Module, dtype: torch.dtype) -> Tensor | None:
    """Return the dense weight, (out, in), of a layer with adapters or a quantized base; None for other layers.

    dtype: of what the layer multiplies, and so of a quantized base; a plain base keeps its own.
    """
    if isinstance(layer, QuantizedBase) and not isinstance(layer, Adapted):
        with _whole(layer):
            return layer.base_weight(dtype)
    found = adapted(layer)
    return None if found is None else _merged(layer, found, dtype)


@attrs.frozen(kw_only=True)
class DenseSizes:
    """Bytes of the weights that `computed_weight` makes for the layers of a module."""

    total: int = 0  # of all layers
    largest: int = 0  # of one layer
    scratch: int = 0  # beside the largest one, while it is made
    sources: int = 0  # of the matrices that they are made from: bases, codes, adapters


def dense_sizes(module: nn.Module) -> DenseSizes:
    """Return the bytes of dense weights of all layers with adapters or quantized bases; also on the meta device."""
    floating = (param.dtype for param in module.parameters() if param.is_floating_point())
    dtype = next(floating, torch.float32)  # of activations, and so of what is made of codes
    total = largest = scratch = sources = 0
    below: set[int] = set()  # layers of PEFT contain their base
    for layer in module.modules():
        is_adapted = adapted(layer) is not None
        if id(layer) in below or not (is_adapted or isinstance(layer, QuantizedBase)):
            continue
        below |= set(map(id, layer.modules()))
        own: Any = layer
        base = base_of(own)
        is_coded = isinstance(base, QuantizedBase)
        numel = base.out_features * base.in_features if is_coded else base.weight.numel()
        size = numel * (dtype if is_coded else base.weight.dtype).itemsize
        total, largest = total + size, max(largest, size)
        scratch = max(scratch, (merge_scratch_bytes(numel) + size * is_coded) * is_adapted)
        sources += sum(param.nbytes for param in layer.parameters() if param.dim() > 1)
    return DenseSizes(total=total, largest=largest, scratch=scratch, sources=sources)


def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (path of a layer, its merged weight) for every layer with adapters; `dict(...)` holds all at once.

    Raises ValueError as `merged_weight` does, if `module` has no adapters, too.
    """
    found = [(name, layer, view) for name, layer in module.named_modules() if (view := adapted(layer)) is not None]
    if not found:
        raise ValueError(without_adapters(module))
    for name, layer, view in found:
        yield name, _merged(layer, view)


@contextmanager
def adapters_disabled(module: nn.Module) -> Iterator[None]:
    """Compute with the base alone inside the block: adapters of ours, and of PEFT.

    Gradients, weights and what is trained stay as they are.  Raises ValueError, before anything changes, if `module`
    has no adapters, or some that cannot be switched off so.
    """
    own = [each for each in module.modules() if isinstance(each, Adapted)]
    others: list[Any] = [each for each in module.modules() if is_switchable(each)]
    _check_switches(module, own, others)
    before = [each.adapter_enabled for each in own], [each._disable_adapters for each in others]
    try:
        for layer in own:
            layer.adapter_enabled = False
        for layer in others:
            layer._disable_adapters = True
        yield
    finally:
        for layer, enabled in zip(own, before[0]):
            layer.adapter_enabled = enabled
        for layer, disabled in zip(others, before[1]):
            layer._disable_adapters = disabled


def merge_lora(module: nn.Module, *, dequantize: bool = False) -> list[str]:
    """Replace the layers of `add_lora` by plain ones with the merged weights; return their names.

    module: without an engine (call `engine.close()` before).
    dequantize: make plain layers of quantized ones, too.

    Raises ValueError, before anything changes, for layers with a quantized base without `dequantize`.
    """
    found = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, LoRALinear)]
    if not found:
        raise ValueError(without_adapters(module))
    for name, layer in found if not dequantize else ():
        if isinstance(layer, QuantizedBase):
            raise ValueError(
                f"the base of {name} is quantized: codes of base + update would round every weight again, and the "
                "model would no longer compute what was trained. Pass dequantize=True for plain layers, and quantize "
                "those anew if you accept that; or keep base and adapters apart (save_adapters)."
            )
    for name, layer in found:
        replace_layer(module, name, layer.plain_layer(merged_weight(layer)))
    return [name for name, _ in found]


def _merged(layer: nn.Module, view: Adapted, dtype: torch.dtype | None = None) -> Tensor:
    """dtype: of a quantized base; None: that of its adapter."""
    base = base_of(layer)
    with _whole(layer):
        weight = base.base_weight(dtype) if isinstance(base, QuantizedBase) else view.base_weight()
        return merge(weight, view.updates())


def _whole(layer: nn.Module) -> AbstractContextManager[None]:
    """Gather a layer's weights, unless an open block holds them."""
    params = list(layer.parameters())
    return nullcontext() if all(map(is_gathered, params)) else gathered(params)


def _check_switches(module: nn.Module, own: Sequence[Adapted], others: Sequence[Any]) -> None:
    configs = getattr(module, "peft_config", None)
    kinds = configs.values() if isinstance(configs, dict) else ()
    if any(getattr(config, "is_prompt_learning", False) for config in kinds):
        raise ValueError("PEFT's prompts are no layers: use the model's own `with model.disable_adapter():`")
    if not own and not others:
        raise ValueError(without_adapters(module))
    if any(getattr(layer, "merged", False) for layer in others):
        raise ValueError(
            "PEFT has merged its adapters into the weights: call model.unmerge_adapter() first. "
            "merged_weights(model) gives merged weights and leaves the base's bits alone."
        )


def without_adapters(module: nn.Module) -> str:
    """Return the message for a module without adapters."""
    return (
        f"{type(module).__name__} has no adapters: call add_lora(module, LoRAConfig(...)), or PEFT's get_peft_model()"
    )
