"""Tensor parallelism: a model whose layers are split over ranks that see the same data.

A `TensorPlan` maps patterns of module names to styles (columns, rows, ...); `parallelize` applies it in
place.  The result is an ordinary model: `zpartition.shard` over the data-parallel ranks adds any ZeRO stage.
"""

from __future__ import annotations

from zpartition._renamed import renamed
from zpartition.tensor.functions import copy, join_features, join_tokens, reduce, slice_features, slice_tokens
from zpartition.tensor.infer_plan import infer_plan, infer_verified_plan
from zpartition.tensor.layer_split import LayerSplit, LinearKind
from zpartition.tensor.layers import (
    ColumnConv1D,
    ColumnForward,
    ColumnLinear,
    GatheredForward,
    LayerPlacement,
    RowConv1D,
    RowForward,
    RowLinear,
    SplitLayer,
)
from zpartition.tensor.marked import adopt_marked_split
from zpartition.tensor.name_plan import plan_by_names
from zpartition.tensor.parallelize import parallelize
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered, resolve
from zpartition.tensor.quantized import QuantizedWeight, by_outputs, cut_weight
from zpartition.tensor.random_state import agree_on_random_numbers
from zpartition.tensor.read_plan import (
    find_tp_plan,
    read_injection_policy,
    read_layer_specs,
    read_tp_plan,
    tp_model_init,
)
from zpartition.tensor.styles import Column, Gather, NormShard, Replicated, Row, RowSplit, Scatter, Style, Vocabulary
from zpartition.tensor.verify import PendingVerification, verify, verify_on_first_call
from zpartition.tensor.vocabulary import VocabularyEmbedding, vocabulary_cross_entropy
from zpartition.tensors.whole import load_whole_state_dict, whole_state_dict

__all__ = [
    "Column",
    "ColumnConv1D",
    "ColumnForward",
    "ColumnLinear",
    "Gather",
    "GatheredForward",
    "LayerPlacement",
    "LayerSplit",
    "LinearKind",
    "NormShard",
    "PendingVerification",
    "QuantizedWeight",
    "Replicated",
    "Row",
    "RowConv1D",
    "RowForward",
    "RowLinear",
    "RowSplit",
    "Rule",
    "Scatter",
    "SplitLayer",
    "Style",
    "TensorPlan",
    "Uncovered",
    "Vocabulary",
    "VocabularyEmbedding",
    "adopt_marked_split",
    "agree_on_random_numbers",
    "by_outputs",
    "copy",
    "cut_weight",
    "find_tp_plan",
    "infer_plan",
    "infer_verified_plan",
    "join_features",
    "join_tokens",
    "load_whole_state_dict",
    "parallelize",
    "plan_by_names",
    "read_injection_policy",
    "read_layer_specs",
    "read_tp_plan",
    "reduce",
    "resolve",
    "slice_features",
    "slice_tokens",
    "tp_model_init",
    "verify",
    "verify_on_first_call",
    "vocabulary_cross_entropy",
    "whole_state_dict",
]

RENAMED = {
    "Cut": "LayerSplit",
    "Summed": "NormShard",
    "Whole": "Replicated",
    "fitted_plan": "infer_verified_plan",
}
__getattr__ = renamed(__name__, RENAMED)
