"""Inference config: every key is honoured, ignored with a notice, or rejected with a reason.

Keyword arguments and `config` are merged; a key in both must have the same value in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from zengine.config import ConfigError, Problem
from zengine.config.grammar.source import read
from zengine.config.grammar.suggest import nearest
from zengine.deepspeed.inference.parallel import KEYS, Parallelism, read_parallelism

__all__ = ["DeepSpeedInferenceConfig", "default_inference_config", "merge_config"]

_DTYPES = {
    **dict.fromkeys(("fp32", "float", "float32", "torch.float32"), torch.float32),
    **dict.fromkeys(("fp16", "half", "float16", "torch.float16"), torch.float16),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
}

# Keys of DeepSpeed's kernels; torch's kernels run here, with the same results.
_NO_EFFECT = frozenset(
    (
        *("replace_with_kernel_inject", "kernel_inject", "replace_method"),
        *("injection_policy_tuple", "triangular_masking", "return_tuple", "transposed_mode"),
        *("set_empty_params", "training_mp_size", "min_out_tokens"),
    )
)
_WHOLE = "a checkpoint has whole weights, and each rank reads its part of them"

# Keys of which only the default is accepted: key -> (default, reason, suggestion).
_REJECTED: dict[str, tuple[Any, str, str]] = {
    "enable_cuda_graph": (False, "CUDA graphs are not captured", "Use torch.compile(mode='reduce-overhead')."),
    "use_triton": (False, "there are no Triton kernels", "Remove it; torch.compile generates some."),
    "triton_autotune": (False, "there are no Triton kernels", "Remove it."),
    "quant": ({}, "quantized weights are not available yet", "Remove it; dtype=torch.bfloat16 halves the bytes."),
    "zero": ({}, "inference does not stream weights", "Evaluate with a stage-3 training engine: engine.eval()."),
    "base_dir": ("", "a checkpoint is one path", "Pass the whole path as checkpoint."),
    "save_mp_checkpoint_path": (None, _WHOLE, "Remove it, and pass the whole model as checkpoint."),
    "checkpoint_config": ({}, _WHOLE, "Pass a path as checkpoint."),
}


@attrs.frozen(kw_only=True)
class DeepSpeedInferenceConfig:
    """Settings of `init_inference`."""

    dtype: torch.dtype = torch.float16  # of the weights
    max_out_tokens: int = 1024  # prompt and answer together; generate() raises above it
    keep_module_on_host: bool = False  # do not move the module
    checkpoint: str | None = None  # file or folder of the weights to load
    ranks: Mapping[str, Any] = attrs.field(factory=dict)  # keys of the parallelism, as given
    notices: tuple[str, ...] = ()  # keys without effect

    @property
    def parallelism(self) -> Parallelism:
        """Return the parallelism that `ranks` describes.  Raises ConfigError."""
        found = read_parallelism(self.ranks)
        if isinstance(found, Parallelism):
            return found
        raise ConfigError("init_inference()", found)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> DeepSpeedInferenceConfig:
        """Read a config.  Raises ConfigError with every unknown, rejected or out-of-range key."""
        ranks = {key: given[key] for key in KEYS if key in given}
        parallelism = read_parallelism(ranks)
        problems = [problem for key, value in given.items() if (problem := _problem(key, value)) is not None]
        if problems or not isinstance(parallelism, Parallelism):
            raise ConfigError(
                "init_inference()", [*problems, *([] if isinstance(parallelism, Parallelism) else parallelism)]
            )
        is_read = bool(parallelism.policy) and not parallelism.is_single_rank
        idle = sorted(key for key in given if key in _NO_EFFECT or (key == "injection_policy" and not is_read))
        notices = (f"init_inference: {', '.join(idle)}: no effect here; torch's kernels run",) if idle else ()
        own = {key: given[key] for key in ("max_out_tokens", "keep_module_on_host", "checkpoint") if key in given}
        if "max_tokens" in given:  # DeepSpeed's alias
            own["max_out_tokens"] = given["max_tokens"]
        return cls(dtype=_dtype(given.get("dtype", torch.float16)), ranks=ranks, notices=notices, **own)


def default_inference_config() -> dict[str, Any]:
    """Return the honoured keys with their defaults."""
    fields = attrs.asdict(DeepSpeedInferenceConfig(), recurse=False)
    del fields["notices"], fields["ranks"]
    return {**fields, "tensor_parallel": {"tp_size": 1}, "moe": {"ep_size": 1}}


def merge_config(config: Any, keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `keywords` into `config`.  Raises ValueError if a key has different values in both."""
    given = _as_dict(config)
    clashes = [key for key in keywords if key in given and given[key] != keywords[key]]
    if clashes:
        values = ", ".join(
            f"{key} is {given[key]!r} in config and {keywords[key]!r} as an argument" for key in clashes
        )
        raise ValueError(f"init_inference() got conflicting values: {values}. Give each key once.")
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
    """Return the problem of one key; None if it is valid."""
    if key in _NO_EFFECT or key in KEYS:
        return None
    if key in _REJECTED:
        default, reason, advice = _REJECTED[key]
        is_off = not value or value == default or (isinstance(value, Mapping) and _is_off(value))
        return None if is_off else Problem(key=key, given=value, reason=reason, suggestion=advice)
    check = _CHECKS.get(key)
    if check is None:
        close = nearest(key, [*_CHECKS, *_REJECTED, *_NO_EFFECT, *KEYS])
        return Problem(key=key, reason="is not a key of the inference config", suggestion=_did_you_mean(close))
    is_good, allowed = check(value)
    return None if is_good else Problem(key=key, given=value, reason=f"must be {allowed}")


def _is_off(section: Mapping[str, Any]) -> bool:
    """Return whether a section says that it is off: configs that are written out whole have such sections."""
    return section.get("enabled", True) is False or section.get("stage") == 0


def _did_you_mean(close: list[str]) -> str:
    return f"Did you mean {close[0]}?" if close else "Remove it."


_CHECKS: dict[str, Any] = {
    "dtype": lambda value: (
        value in _DTYPES.values() or str(value).lower() in _DTYPES,
        "float32, float16 or bfloat16 (int8 weights are not available yet)",
    ),
    "max_out_tokens": lambda value: (_is_count(value), "an integer >= 1"),
    "max_tokens": lambda value: (_is_count(value), "an integer >= 1"),
    "keep_module_on_host": lambda value: (isinstance(value, bool), "true or false"),
    "checkpoint": lambda value: (
        value is None or isinstance(value, str),
        "the path of a weight file or of a Hugging Face folder",
    ),
}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
