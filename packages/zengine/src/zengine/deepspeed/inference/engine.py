"""`init_inference`: a model in one dtype, on the device, without gradients; shared by several ranks if they are told.

Ranks that share layers (tensor parallel) give the same inputs, make the same calls, and all get the whole outputs.
Ranks that share experts may have inputs of their own, but call equally often: each call exchanges tokens.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from zengine.build.tensor_parallel import VERIFIED_NUMEL
from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.inference import splitting, weights
from zengine.deepspeed.inference.config import DeepSpeedInferenceConfig, merged

__all__ = ["InferenceEngine", "init_inference"]

log = logging.getLogger("zengine")


class InferenceEngine(nn.Module):
    """Runs `module` without gradients; anything else is asked of the module itself (`engine.generate`, ...)."""

    def __init__(self, module: nn.Module, config: DeepSpeedInferenceConfig) -> None:
        super().__init__()
        self.module = _prepared(module, config).eval()
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

    config and keywords are one config: a key that both have must have one value.  With tensor_parallel={"tp_size": n}
    runs of n ranks split its layers, with moe={"ep_size": n} they share out its experts, in place; every rank calls
    with the same model.  With checkpoint= each rank reads its own part, and the model may be on the meta device.

    Raises:
        ValueError: ConfigError for unknown, refused and impossible keys, all at once, by name; numbers of ranks,
            heads or experts that do not go together, and weights that do not fit, before anything is sent.
        RanksDisagree: ranks came with different models.
    """
    if isinstance(model, InferenceEngine):
        raise ValueError("init_inference() got what it made before: give it engine.module, with the new config.")
    if not isinstance(model, nn.Module):
        raise TypeError(f"init_inference() needs a torch.nn.Module, got {type(model).__name__}")
    settings = DeepSpeedInferenceConfig.of(merged(config, kwargs))
    for notice in settings.notices:
        log.warning("%s", notice)
    return InferenceEngine(model, settings)


def _prepared(module: nn.Module, config: DeepSpeedInferenceConfig) -> nn.Module:
    """`module` with its weights, or this rank's part of them."""
    host = next((param.device for param in module.parameters() if not param.is_meta), torch.device("cpu"))
    device = host if config.keep_module_on_host else torch.device(get_accelerator().device_name(None))
    path, is_hollow = config.checkpoint, weights.is_hollow(module)
    if path is not None:
        weights.refuse_unfit(module, path)
    elif is_hollow:
        raise ValueError(
            f"{type(module).__name__} is on the meta device, where it has no weights: give checkpoint= a file of "
            "them, or a Hugging Face folder."
        )
    if is_hollow and _is_to_be_run(module, config):
        assert path is not None
        weights.make_real(module, host)
        weights.load(module, path)
        path = None
    split = splitting.planned(module, config.sharing)
    split.agree(module)
    if not weights.is_hollow(module):
        module = module.to(device)  # groups of GPUs send nothing that is on the host
    split = split.settled(module)
    module = module.to(dtype=config.dtype)
    split.carry_out(module)
    if path is not None:
        weights.make_real(module, device)
        weights.load(module, path)
    return module.to(device)


def _is_to_be_run(module: nn.Module, config: DeepSpeedInferenceConfig) -> bool:
    """Return whether a plan has to be found by running the model, and memory for all of it is no question."""
    sharing = config.sharing
    is_small = sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL
    return not sharing.is_idle and is_small and splitting.written_plan(module, sharing) is None
