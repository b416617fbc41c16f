"""The inference config: what is honoured, what has no effect, and what is refused, each by name.

Keyword arguments and `config` are one config given in two places; a key that both have must have one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from zengine.config import ConfigError, Problem
from zengine.config.grammar.source import read
from zengine.config.grammar.suggest import nearest
from zengine.deepspeed.inference.parallel import KEYS, Sharing, read_sharing

__all__ = ["DeepSpeedInferenceConfig", "default_inference_config", "merged"]

_DTYPES = {
    **dict.fromkeys(("fp32", "float", "float32", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "half", "float16", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}

# Keys that say how DeepSpeed's kernels work: here torch's own do, with the same results.
_NO_EFFECT = frozenset(
    (
        *("replace_with_kernel_inject", "kernel_inject", "replace_method"),
        *("injection_policy_tuple", "triangular_masking", "return_tuple", "transposed_mode"),
        *("set_empty_params", "training_mp_size", "min_out_tokens"),
    )
)
_WHOLE = "weights are whole in a checkpoint, and each rank reads its part of them"

# Keys whose default is accepted and whose other values are refused: key -> (default, why, what to do).
_REFUSED: dict[str, tuple[Any, str, str]] = {
    "enable_cuda_graph": (False, "CUDA graphs are not captured", "Use torch.compile(mode='reduce-overhead')."),
    "use_triton": (False, "there are no Triton kernels", "Leave it out; torch.compile makes some."),
    "triton_autotune": (False, "there are no Triton kernels", "Leave it out."),
    "quant": ({}, "quantised weights are not available yet", "Leave it out; dtype=torch.bfloat16 halves the bytes."),
    "zero": ({}, "weights are not streamed during inference", "Train-time stage 3 evaluates: engine.eval()."),
    "base_dir": ("", "a checkpoint is one path", "Write the whole path in checkpoint."),
    "save_mp_checkpoint_path": (None, _WHOLE, "Leave it out, and give checkpoint the whole model."),
    "checkpoint_config": ({}, _WHOLE, "Give checkpoint a path."),
}


@attrs.frozen(kw_only=True)
class DeepSpeedInferenceConfig:
    """What `init_inference` does."""

    dtype: torch.dtype = torch.float16  # the weights' in the engine
    max_out_tokens: int = 1024  # prompt and answer together; more is refused
    keep_module_on_host: bool = False  # leave the module where it is
    checkpoint: str | None = None  # file or folder whose weights are loaded first
    ranks: Mapping[str, Any] = attrs.field(factory=dict)  # keys that say which ranks share the model, as given
    notices: tuple[str, ...] = ()  # keys without effect

    @property
    def sharing(self) -> Sharing:
        """Return what `ranks` comes to.  Raises ConfigError."""
        found = read_sharing(self.ranks)
        if isinstance(found, Sharing):
            return found
        raise ConfigError("init_inference()", found)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
        """Raises ConfigError, with every problem, for what is unknown, refused or out of range."""
        ranks = {key: given[key] for key in KEYS if key in given}
        sharing = read_sharing(ranks)
        problems = [problem for key, value in given.items() if (problem := _problem(key, value)) is not None]
        if problems or not isinstance(sharing, Sharing):
            raise ConfigError("init_inference()", [*problems, *([] if isinstance(sharing, Sharing) else sharing)])
        is_read = bool(sharing.policy) and not sharing.is_idle
        idle = sorted(key for key in given if key in _NO_EFFECT or (key == "injection_policy" and not is_read))
        notices = (
            (f"init_inference: {', '.join(idle)}: no effect here, torch's own kernels are used",) if idle else ()
        )
        own = {key: given[key] for key in ("max_out_tokens", "keep_module_on_host", "checkpoint") if key in given}
        if "max_tokens" in given:  # DeepSpeed's other name of it
            own["max_out_tokens"] = given["max_tokens"]
        return cls(dtype=_dtype(given.get("dtype", torch.float16)), ranks=ranks, notices=notices, **own)


def default_inference_config() -> dict[str, Any]:
    """The keys that are honoured, with their defaults."""
    fields = attrs.asdict(DeepSpeedInferenceConfig(), recurse=False)
    del fields["notices"], fields["ranks"]
    return {**fields, "tensor_parallel": {"tp_size": 1}, "moe": {"ep_size": 1}}


def merged(config: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """One config out of both.  Raises ValueError for a key that they give different values."""
    given = _as_dict(config)
    clashes = [key for key in keywords if key in given and given[key] != keywords[key]]
    if clashes:
        told = ", ".join(f"{key} is {given[key]!r} in config and {keywords[key]!r} as an argument" for key in clashes)
        raise ValueError(f"init_inference() got conflicting values: {told}. Give each key once.")
    return {**given, **keywords}


def _as_dict(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, DeepSpeedInferenceConfig):
        fields = attrs.asdict(config, recurse=False)
        del fields["notices"]
        return {**fields.pop("ranks"), **fields}
    if isinstance(config, Mapping):
        return dict(config)
    document = read(config)
    if document.problems:
        raise ConfigError(document.source, document.problems)
    found: Any = document.data or {}
    return {str(key): value for key, value in found.items()}


def _dtype(value: Any) -> torch.dtype:
    return value if isinstance(value, torch.dtype) else _DTYPES[str(value).lower()]


def _problem(key: str, value: Any) -> Problem | None:
    """Return what is wrong with one key; None if nothing is."""
    if key in _NO_EFFECT or key in KEYS:
        return None
    if key in _REFUSED:
        default, reason, advice = _REFUSED[key]
        return (
            None if not value or value == default else Problem(key=key, given=value, reason=reason, suggestion=advice)
        )
    check = _CHECKS.get(key)
    if check is None:
        close = nearest(key, [*_CHECKS, *_REFUSED, *_NO_EFFECT, *KEYS])
        return Problem(key=key, reason="is no key of the inference config", suggestion=_did_you_mean(close))
    is_good, allowed = check(value)
    return None if is_good else Problem(key=key, given=value, reason=f"must be {allowed}")


def _did_you_mean(close: list[str]) -> str:
    return f"Did you mean {close[0]}?" if close else "Remove it."


_CHECKS: dict[str, Any] = {
    "dtype": lambda value: (
        value in _DTYPES.values() or str(value).lower() in _DTYPES,
        "float32, float16 or bfloat16 (int8 weights are not available yet)",
    ),
    "max_out_tokens": lambda value: (_is_count(value), "a whole number of 1 or more"),
    "max_tokens": lambda value: (_is_count(value), "a whole number of 1 or more"),
    "keep_module_on_host": lambda value: (isinstance(value, bool), "true or false"),
    "checkpoint": lambda value: (
        value is None or isinstance(value, str),
        "the path of a file of weights, or of a Hugging Face folder",
    ),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
