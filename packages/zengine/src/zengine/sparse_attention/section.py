"""Pattern of the config's section sparse_attention, for the attention layers of a model."""

from __future__ import annotations

from typing import Any

from zengine.config.keys.features import SparseAttention
from zengine.config.plan.technique_rules import KEYS_OF_MODE
from zengine.sparse_attention import layouts

__all__ = ["make_sparsity_config"]

_CLASSES: dict[str, type[layouts.SparsityConfig]] = {
    "dense": layouts.DenseSparsityConfig,
    "fixed": layouts.FixedSparsityConfig,
    "variable": layouts.VariableSparsityConfig,
    "bigbird": layouts.BigBirdSparsityConfig,
    "bslongformer": layouts.BSLongformerSparsityConfig,
}


def make_sparsity_config(section: SparseAttention, num_heads: int) -> layouts.SparsityConfig:
    """Return the pattern of `engine.plan.sparse_attention` for layers with `num_heads` heads.

    Raises ValueError for values that contradict each other.
    """
    options: dict[str, Any] = {name: getattr(section, name) for name in KEYS_OF_MODE[section.mode]}
    if "global_block_end_indices" in options:
        options["global_block_end_indices"] = options["global_block_end_indices"] or None
    return _CLASSES[section.mode](num_heads, block=section.block, **options)
