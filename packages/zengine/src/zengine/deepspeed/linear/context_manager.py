"""`deepspeed.linear.context_manager`: models of Transformers built with LoRA layers."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import nn

from zengine.deepspeed.linear.config import LoRAConfig, QuantizationConfig
from zengine.deepspeed.linear.optimized_linear import LoRAOptimizedLinear, OptimizedLinear

__all__ = ["Init", "init_lora"]

log = logging.getLogger("zengine")


def init_lora(model: nn.Module) -> None:
    """Freeze `model` and make the adapters of its LoRA layers."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        if isinstance(module, LoRAOptimizedLinear):
            module.init_lora()


@final
class Init:
    """Context in which `torch.nn.Linear(...)` makes an OptimizedLinear.

    Models of `AutoModelForCausalLM.from_pretrained` and `from_config` get their adapters; for any other model call
    `init_lora` afterwards.
    """

    def __init__(self, lora_config: LoRAConfig | None = None, quant_config: QuantizationConfig | None = None) -> None:
        self.lora_config, self.quant_config = lora_config, quant_config
        self._has_adapters = False

    def __enter__(self) -> Self:
        """Replace torch.nn.Linear and the two functions of Transformers, until the block ends."""
        plain = self._plain = nn.Linear
        if self.lora_config is not None:
            self.lora_config.delay_lora_init = True
        lora, quantization = self.lora_config, self.quant_config

        class OptLinearWrapper:
            def __new__(cls, *args: Any, **kwargs: Any) -> Any:
                given = dict(zip(("input_dim", "output_dim", "bias", "device", "dtype"), args))
                names = {"in_features": "input_dim", "out_features": "output_dim"}
                given |= {names.get(name, name): value for name, value in kwargs.items()}
                given = {name: value for name, value in given.items() if value is not None}
                given.setdefault("dtype", torch.get_default_dtype())
                return OptimizedLinear(**given, lora_config=lora, quantization_config=quantization, linear_cls=plain)

        torch.nn.Linear = OptLinearWrapper  # type: ignore[misc]
        self._originals: list[tuple[type, str, Any]] = []  # class, name, its own member or None if inherited
        if importlib.util.find_spec("transformers") is not None:
            from transformers import AutoModelForCausalLM

            for name in ("from_pretrained", "from_config"):
                self._originals.append((AutoModelForCausalLM, name, vars(AutoModelForCausalLM).get(name)))
                setattr(AutoModelForCausalLM, name, self._adapting(getattr(AutoModelForCausalLM, name)))
        return self

    def _adapting(self, make: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
        @functools.wraps(make)
        def make_with_adapters(*args: Any, **kwargs: Any) -> nn.Module:
            model = make(*args, **kwargs)
            if self.lora_config is not None:
                init_lora(model)
            self._has_adapters = True
            return model

        return make_with_adapters

    def __exit__(self, *args: object) -> None:
        """Restore what was replaced; log a warning if no adapters were made."""
        torch.nn.Linear = self._plain  # type: ignore[misc]
        for kind, name, own in self._originals:
            if own is None:
                delattr(kind, name)
            else:
                setattr(kind, name, own)
        if self.lora_config is not None and not self._has_adapters:
            log.warning("no adapters yet: call deepspeed.linear.init_lora(model) for each model built in this block")
