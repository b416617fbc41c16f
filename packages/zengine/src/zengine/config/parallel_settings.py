"""The settings that split a model over ranks: one class a section, and how many ranks each kind of split takes."""

from __future__ import annotations

from typing import Any

import attrs

from zengine.config.kinds import LIST, TEXT, TRUTH, choice, null_or, whole
from zengine.config.table import setting


@attrs.frozen(kw_only=True)
class LayerSpec:
    """A member of tensor_parallel.partition_config.layer_specs; zpartition.tensor.read_layer_specs reads it."""

    patterns: tuple[Any, ...] = setting(LIST, (), "regular expressions over names of weights")
    partition_type: str = setting(choice("column", "row", "skip"), "column", "which side of the weight is shared out")
    shape: tuple[Any, ...] = setting(LIST, (), "[n, -1]: n equal blocks of rows; [[a, b], -1]: blocks of these sizes")
    partition_dim: int = setting(whole(0), 0, "of `shape`; 0")
    model_types: tuple[Any, ...] = setting(null_or(LIST, ()), (), "only for models of these types; none: for all")
    gather_output: bool = setting(TRUTH, False, "every rank gets all outputs of a column layer")


@attrs.frozen(kw_only=True)
class PartitionConfig:
    """tensor_parallel.partition_config: layers and how they are split, by name."""

    use_default_specs: bool = setting(TRUTH, True, "layers that no spec names are split as the model itself suggests")
    strict_mode: bool = setting(TRUTH, False, "a linear layer that nothing names is an error")
    layer_specs: tuple[LayerSpec, ...] = ()


@attrs.frozen(kw_only=True)
class TensorRanks:
    """tensor_parallel.tp: DeepSpeed's second way to say the size."""

    tp_size: int = setting(whole(1), 1, "the same as autotp_size")
    tp_grain_size: int = setting(whole(1), 1, "columns that stay together where there are no heads")


@attrs.frozen(kw_only=True)
class TensorParallel:
    """tensor_parallel: layers split over ranks that see the same samples."""

    autotp_size: int = setting(whole(0), 0, "ranks that share the layers of one copy; 0 and 1: every rank has all")
    tp: TensorRanks = TensorRanks()
    partition_config: PartitionConfig = PartitionConfig()
    vocab_parallel_lm_head: bool = setting(
        null_or(TRUTH, False), False, "split embeddings and the output layer of an inferred plan too"
    )


@attrs.frozen(kw_only=True)
class ExpertParallel:
    """expert_parallel: the experts of MoE layers shared out over ranks that see different samples."""

    enabled: bool = setting(TRUTH, False, "share the experts out; MoE layers made with an ep_size are without it")
    autoep_size: int = setting(whole(1), 1, "ranks that hold the experts of one layer together")
    moe_layer_pattern: str | None = setting(
        null_or(TEXT, ""), "", "regular expression found in the paths of the layers to share out; empty: all"
    )


def in_order(**members: LayerSpec) -> tuple[LayerSpec, ...]:
    """Specs that were given under names."""
    return tuple(members.values())
