"""LoRA layers of PEFT and of DeepSpeed-Chat, seen as `Adapted`.

PEFT is never imported: its layers exist only if somebody imported it.  DeepSpeed-Chat's are told by their attributes.
"""

from __future__ import annotations

import sys
from typing import Any, final

import attrs
from torch import Tensor, nn

from zengine.adapters.update import Adapted, Update

__all__ = ["adapted", "base_of", "is_switchable", "parts_of_adapters"]

_LAYERS, _MODULES = "peft.tuners.lora.layer", "peft.tuners.tuners_utils"


@final
@attrs.define(eq=False)
class PeftLinear:
    """One of PEFT's LoRA layers over a linear layer."""

    layer: Any
    adapter_enabled: bool

    def base_weight(self) -> Tensor:
        """Return the base's weight, (out, in)."""
        base = base_of(self.layer)
        own = getattr(base, "base_weight", None)  # of a quantized layer
        weight: Tensor = base.weight if own is None else own()
        return weight if own is not None or isinstance(base, nn.Linear) else weight.t()

    def updates(self) -> list[Update]:
        """Return the updates of the active adapters.  Raises ValueError for kinds that are no sum, such as DoRA."""
        layer = self.layer
        if layer.disable_adapters or layer.merged:
            return []
        found = []
        for name in (each for each in layer.active_adapters if each in layer.lora_A):
            kind = layer.lora_variant.get(name)
            if kind is not None or layer.lora_bias[name]:
                what = "a trained bias" if kind is None else type(kind).__name__
                raise ValueError(
                    f"PEFT's adapter {name!r} has {what}, which is no update of the weight alone: merge it with "
                    "PEFT's merge_and_unload() on a copy of the model, or use plain LoRA."
                )
            found.append(Update(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]))
        return found


@final
@attrs.define(eq=False)
class ChatLinear:
    """DeepSpeed-Chat's linear layer with `lora_right_weight` (in, rank) and `lora_left_weight` (rank, out)."""

    layer: Any
    adapter_enabled: bool = True

    def base_weight(self) -> Tensor:
        """Return the weight, (out, in)."""
        weight: Tensor = self.layer.weight
        return weight

    def updates(self) -> list[Update]:
        """Return the update; none while it is fused into the weight."""
        layer = self.layer
        if layer.fuse_lora:
            return []
        return [Update(layer.lora_right_weight.t(), layer.lora_left_weight.t(), layer.lora_scaling)]


_CHAT = {"weight", "lora_right_weight", "lora_left_weight"}


def adapted(module: nn.Module) -> Adapted | None:
    """Return the adapters of a linear layer, ours, PEFT's or DeepSpeed-Chat's; None if it has none."""
    if hasattr(type(module), "base_weight") and isinstance(module, Adapted):  # the second is slow
        return module
    if module._parameters.keys() >= _CHAT and hasattr(module, "fuse_lora") and hasattr(module, "lora_scaling"):
        return ChatLinear(module)
    peft = sys.modules.get(_LAYERS)
    if peft is None or not isinstance(module, peft.LoraLayer):
        return None
    base = base_of(module)
    is_linear = isinstance(base, nn.Linear) or hasattr(base, "nf") or hasattr(base, "base_weight")
    return PeftLinear(module, not module.disable_adapters) if is_linear else None


def base_of(layer: Any) -> Any:
    """Return the layer below an adapter of PEFT; other layers are their own base."""
    return layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer


def is_switchable(module: nn.Module) -> bool:
    """Return whether PEFT's own switch turns something of this module off: any adapter, or a trained copy."""
    return sys.modules.get(_MODULES) is not None and hasattr(module, "_disable_adapters")


def parts_of_adapters(module: nn.Module) -> frozenset[str]:
    """Return the names of modules below adapted layers; an adapted layer itself is none."""
    found = set()
    for name, child in module.named_modules():
        if adapted(child) is not None:
            found |= {f"{name}.{below}" for below, _ in child.named_modules() if below}
    return frozenset(found)
