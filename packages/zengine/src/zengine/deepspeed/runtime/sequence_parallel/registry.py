"""Where Transformers looks attentions up, and what is asked of a config; imports it when something is asked."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from zpartition import sequence

__all__ = ["attentions", "config_of", "put", "restore"]

# They make masks over pairs of a piece's tokens, or look their function up elsewhere.
_UNFIT = ("eager", "paged|eager")

_NEEDED = 'this needs Transformers: pip install "transformers>=5"'


def attentions() -> MutableMapping[str, Any]:
    """The functions of all models, by name.  Raises ModuleNotFoundError without Transformers."""
    try:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"{error}; {_NEEDED}", name=error.name) from None
    found: MutableMapping[str, Any] = ALL_ATTENTION_FUNCTIONS
    return found


def config_of(model_name_or_path: Any) -> tuple[Any, str]:
    """(the config of a model's text part, the attention that it was loaded with; "" for one that is not loaded)."""
    if isinstance(model_name_or_path, str):
        try:
            from transformers import AutoConfig
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(f"{error}; {_NEEDED}", name=error.name) from None
        return AutoConfig.from_pretrained(model_name_or_path).get_text_config(), ""
    config = getattr(model_name_or_path, "config", None)
    if config is None:
        raise TypeError(
            f"register_with_transformers(model_name_or_path={type(model_name_or_path).__name__}): a model with a "
            "config, or the name or path of one, is needed."
        )
    return config.get_text_config(), getattr(config, "_attn_implementation", "") or ""


def put(name: str, group: Any, *, disable_in_eval: bool) -> None:
    """Let the attention `name` work over the ranks of `group`, in place of what it was over.

    Raises ValueError if there is none of that name, or it cannot.
    """
    registry = attentions()
    if name in _UNFIT or name not in registry:
        names = ", ".join(sorted(key for key in registry if key not in _UNFIT))
        raise ValueError(
            f"core_attn_implementation={name!r} cannot work on shared-out sequences: allowed are {names}. Load the "
            'model with one of them, attn_implementation="sdpa" say.'
        )
    registry[name] = sequence.ModelAttention.over(registry[name], name, group, disable_in_eval=disable_in_eval)


def restore() -> None:
    """Let all attentions be what they were."""
    registry = attentions()
    for name, function in list(registry.items()):
        if isinstance(function, sequence.ModelAttention):
            registry[name] = function.core
