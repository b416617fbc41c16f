"""`deepspeed.module_inject.tp_shard`: sizes of the parts of a dimension that tensor ranks hold."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.deepspeed.comm.world import get_rank, get_world_size

__all__ = ["AutoTPMeta", "get_shard_size", "get_shard_size_list"]

# Attributes of configs of Transformers and of remote code, the first one that has a value counts.
_KEY_VALUE_HEADS = (
    *("num_key_value_heads", "num_kv_heads", "multi_query_group_num", "n_head_kv", "kv_n_heads"),
    *("num_attention_heads", "n_heads", "attention_heads"),
)
_QUERY_HEADS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "attention_heads")
_WIDTHS = ("n_embd", "hidden_size")
_UNGROUPED = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "mlp")  # layers without heads, by parts of names


@attrs.frozen(kw_only=True)
class AutoTPMeta:
    """Numbers of a model that its split depends on."""

    num_kv_heads: int | None = None  # None: dimensions are split evenly
    num_attention_heads: int | None = None
    n_embd: int | None = None
    tp_grain_size: int = 1  # parts are multiples of it, but for the last one

    @classmethod
    def from_model_config(cls, model_config: Any, tp_grain_size: int = 1) -> AutoTPMeta:
        """Read a config of Transformers (of a multimodal model its `text_config`); None: nothing is known."""
        config = getattr(model_config, "text_config", None) or model_config
        kv_heads, heads, width = (_first(config, names) for names in (_KEY_VALUE_HEADS, _QUERY_HEADS, _WIDTHS))
        return cls(num_kv_heads=kv_heads, num_attention_heads=heads, n_embd=width, tp_grain_size=tp_grain_size)


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


def get_shard_size(
    total_size: int,
    mp_size: int,
    meta: AutoTPMeta,
    name: str | None = None,
    rank: int | None = None,
    mp_group: Any = None,
) -> int:
    """Return the size of this tensor rank's part of `total_size`, which is split over `mp_size` ranks.

    A layer of heads (by its name) is split between key-value heads, any other evenly in multiples of the grain.
    rank: index in the tensor group; None: this rank's in `mp_group`, or in the world.

    Raises ValueError if rank and mp_group are missing and the world has another size.
    """
    if rank is None:
        if mp_group is None and get_world_size() != mp_size:
            raise ValueError(
                f"get_shard_size needs rank= or mp_group=: mp_size is {mp_size}, but the world has "
                f"{get_world_size()} ranks"
            )
        rank = get_rank(mp_group)
    layer = str(name)
    has_heads = layer not in ("lm_head", "embed_out") and not any(part in layer for part in _UNGROUPED)
    if meta.num_kv_heads is not None and total_size % meta.num_kv_heads == 0 and has_heads:
        return total_size // meta.num_kv_heads * _share(meta.num_kv_heads, mp_size, rank)
    if total_size < meta.tp_grain_size:
        return _share(total_size, mp_size, rank)
    grains, rest = divmod(total_size, meta.tp_grain_size)
    return _share(grains, mp_size, rank) * meta.tp_grain_size + (rest if rank == mp_size - 1 else 0)


def get_shard_size_list(total_size: int, mp_size: int, meta: AutoTPMeta, name: str | None = None) -> list[int]:
    """Return the sizes of all tensor ranks' parts."""
    return [get_shard_size(total_size, mp_size, meta, name, rank) for rank in range(mp_size)]


def _share(count: int, size: int, rank: int) -> int:
    """Return the share of `rank`: all equal, but for one more on the first ranks."""
    return count // size + (rank < count % size)
