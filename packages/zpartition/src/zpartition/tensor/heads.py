"""The heads of an attention module, read from its attributes or its config.

Splitting an attention gives each rank some heads.  Two things follow: weights are split between heads (between groups
of query heads where several share a key-value head), and the head counts that a module keeps, by which it views its
tensors, become this rank's.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from torch import nn

__all__ = ["NO_HEADS", "Heads", "heads_of", "set_local_counts"]

_QUERY = ("num_heads", "num_attention_heads", "num_attn_heads", "n_heads", "n_head", "nhead", "nheads", "heads")
_KEY_VALUE = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")
_MARKS = ("head_dim", "attention_head_size", "head_size", "d_head")  # attributes of attention modules
_WIDTHS = ("split_size", "embed_dim", "all_head_size", "inner_dim", "hidden_size", "d_model", "dim", "hidden_dim")


@attrs.frozen
class Heads:
    """Head counts of an attention."""

    query: int
    key_value: int

    @property
    def units(self) -> int:
        """Number of groups that cannot be split further: query heads around a key-value head."""
        return min(self.query, self.key_value)


NO_HEADS = Heads(0, 0)


def heads_of(module: nn.Module) -> Heads:
    """Return the heads of `module`; NO_HEADS if it is no attention."""
    query, key_value = _read_number(module, _QUERY), _read_number(module, _KEY_VALUE)
    if not query and any(_read_number(module, (mark,)) for mark in _MARKS):
        config = getattr(module, "config", None)
        query, key_value = _read_number(config, _QUERY), key_value or _read_number(config, _KEY_VALUE)
    return Heads(query, key_value or query) if query else NO_HEADS


def set_local_counts(module: nn.Module, num_units: int, own_units: int, widths: Iterable[int]) -> None:
    """Set the counts that `module` keeps to this rank's: heads, and widths of layers that are split."""
    wide = set(widths)
    for name, value in list(vars(module).items()):
        is_count = name in (*_QUERY, *_KEY_VALUE)
        is_width = name in _WIDTHS and value in wide
        if (is_count or is_width) and isinstance(value, int) and value % num_units == 0:
            setattr(module, name, value // num_units * own_units)


def _read_number(source: object, names: Iterable[str]) -> int:
    """Return the first of the attributes that is a positive int; 0 if none is."""
    found = (getattr(source, name, None) for name in names)
    return next((value for value in found if type(value) is int and value > 0), 0)
