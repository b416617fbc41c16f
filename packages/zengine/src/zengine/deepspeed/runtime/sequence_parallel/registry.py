"""Attention functions and configs of Transformers, which is imported on first use."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from zpartition import sequence

__all__ = ["attention_registry", "config_of", "register_attention", "restore_attentions"]

# They build masks over the tokens of one shard, or find their function elsewhere.
_UNSUPPORTED = ("eager", "paged|eager")

_NEEDED = 'Transformers is required: pip install "transformers>=5"'


def attention_registry() -> MutableMapping[str, Any]:
    """Return the attention functions of all models, by name.  Raises ModuleNotFoundError without Transformers."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {_NEEDED}", name=error.name) from None
    found: MutableMapping[str, Any] = ALL_ATTENTION_FUNCTIONS
    return found


def config_of(model_name_or_path: Any) -> tuple[Any, str]:
    """Return (text config of a model, the attention it was loaded with or "")."""
    if isinstance(model_name_or_path, str):
        try:
            from transformers import AutoConfig
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {_NEEDED}", name=error.name) from None
        return AutoConfig.from_pretrained(model_name_or_path).get_text_config(), ""
    config = getattr(model_name_or_path, "config", None)
    if config is None:
        raise TypeError(
            f"register_with_transformers(model_name_or_path={type(model_name_or_path).__name__}): pass a model with "
            "a config, or the name or path of a model."
        )
    return config.get_text_config(), getattr(config, "_attn_implementation", "") or ""


def register_attention(name: str, group: Any, *, disable_in_eval: bool) -> None:
    """Register the attention `name` over the ranks of `group`; replaces an earlier group.

    Raises ValueError for an unknown or unsupported name.
    """
    registry = attention_registry()
    if name in _UNSUPPORTED or name not in registry:
        names = ", ".join(sorted(key for key in registry if key not in _UNSUPPORTED))
        raise ValueError(
            f"core_attn_implementation={name!r} does not support sequence parallelism; allowed are {names}. Load the "
            'model with one of them, for example attn_implementation="sdpa".'
        )
    registry[name] = sequence.ModelAttention.over(registry[name], name, group, disable_in_eval=disable_in_eval)


def restore_attentions() -> None:
    """Restore all original attention functions."""
    registry = attention_registry()
    for name, function in list(registry.items()):
        if isinstance(function, sequence.ModelAttention):
            registry[name] = function.core
