"""Tensor parallelism: a model whose layers are split over ranks that see the same data.

A `TensorPlan` says by patterns which layers are split by columns and which by rows; `parallelize` does it, in place.
What comes out is a model like any other: `zpartition.shard` over the data-parallel ranks gives it any ZeRO stage.
"""

from __future__ import annotations

from zpartition.tensor.inferring import fitted_plan, infer_plan
from zpartition.tensor.initialise import tp_model_init
from zpartition.tensor.layers import ColumnConv1D, ColumnLinear, RowConv1D, RowLinear
from zpartition.tensor.parallelize import parallelize
from zpartition.tensor.placing import Cut
from zpartition.tensor.plan import Rule, TensorPlan, Uncovered, resolve
from zpartition.tensor.reading import read_injection_policy, read_layer_specs, read_tp_plan
from zpartition.tensor.styles import Column, Gather, Row, Scatter, Style, Summed, Vocabulary, Whole
from zpartition.tensor.verifying import verify
from zpartition.tensor.vocabulary import VocabularyEmbedding, vocabulary_cross_entropy
from zpartition.whole import load_whole_state_dict, whole_state_dict

__all__ = [
    "Column",
    "ColumnConv1D",
    "ColumnLinear",
    "Cut",
    "Gather",
    "Row",
    "RowConv1D",
    "RowLinear",
    "Rule",
    "Scatter",
    "Style",
    "Summed",
    "TensorPlan",
    "Uncovered",
    "Vocabulary",
    "VocabularyEmbedding",
    "Whole",
    "fitted_plan",
    "infer_plan",
    "load_whole_state_dict",
    "parallelize",
    "read_injection_policy",
    "read_layer_specs",
    "read_tp_plan",
    "resolve",
    "tp_model_init",
    "verify",
    "vocabulary_cross_entropy",
    "whole_state_dict",
]
