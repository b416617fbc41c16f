"""`init_inference`: a model in one dtype, on the device, without gradients."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig, merged

__all__ = ["InferenceEngine", "init_inference"]

log = logging.getLogger("zengine")


class InferenceEngine(nn.Module):
    """Runs `module` without gradients; anything else is asked of the module itself (`engine.generate`, ...)."""

    def __init__(self, module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        if config.checkpoint is not None:
            _load(module, config.checkpoint)
        module = module.to(dtype=config.dtype)
        if not config.keep_module_on_host:
            module = module.to(get_accelerator().device_name(None))
        self.module = module.eval()
        self._limit = config.max_out_tokens

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's value, computed without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The module's `generate`, for prompts and answers of max_out_tokens at most.

        Raises ValueError beyond that, AttributeError where the module cannot generate.
        """
        make = getattr(self.module, "generate", None)
        if make is None:
            raise AttributeError(f"{type(self.module).__name__} has no generate(): call the engine itself")
        prompt = kwargs.get("input_ids", args[0] if args else None)
        length = prompt.shape[-1] if isinstance(prompt, Tensor) else 0
        total = max(length + int(kwargs.get("max_new_tokens") or 0), int(kwargs.get("max_length") or 0))
        if total > self._limit:
            raise ValueError(
                f"generate() would reach {total} tokens (a prompt of {length}), and max_out_tokens is {self._limit}: "
                "pass a larger max_out_tokens to init_inference()."
            )
        with torch.no_grad():
            return make(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)


def init_inference(model: nn.Module, config: Any = None, **kwargs: Any) -> InferenceEngine:
    """`model`, cast (fp16 unless `dtype` says otherwise), moved and frozen in evaluation; its weights are changed.

    config and keywords are one config: a key that both have must have one value.

    Raises ValueError (ConfigError for unknown, refused and impossible keys, all at once, by name).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"init_inference() needs a torch.nn.Module, got {type(model).__name__}")
    settings = DeepSpeedInferenceConfig.of(merged(config, kwargs))
    for notice in settings.notices:
        log.warning("%s", notice)
    return InferenceEngine(model, settings)


def _load(module: nn.Module, path: str) -> None:
    """Weights of a file or a folder, tensor by tensor, mapped."""
    import zckpt.interchange  # not at the top: it takes longer to import than the rest of this package

    with zckpt.interchange.read_weights(path) as weights:
        state = {name: weights[name].view for name in weights}
        missing, unexpected = module.load_state_dict(state, strict=False)
        tied = {name for name, _ in module.named_parameters(remove_duplicate=False)} - dict(
            module.named_parameters()
        ).keys()
        if unexpected or set(missing) - tied:
            raise ValueError(
                f"{path} does not fit {type(module).__name__}: missing {sorted(set(missing) - tied)[:5]}, unexpected "
                f"{sorted(unexpected)[:5]}"
            )
