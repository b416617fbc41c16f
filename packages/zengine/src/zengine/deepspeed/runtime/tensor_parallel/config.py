"""`deepspeed.runtime.tensor_parallel.config`: the section `tensor_parallel` of a config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, final

import torch

from zengine.config.grammar.table import section_of
from zengine.config.keys.parallel import TENSOR_PARALLEL, TENSOR_RANKS, TensorParallel, TensorRanks
from zengine.deepspeed.module_inject.modes import AUTOTP_MODE
from zengine.deepspeed.section_model import SectionModel

__all__ = ["AUTOTP_MODE", "TPConfig", "TPTrainingConfig", "get_tensor_parallel_config"]


@final
class TPConfig(SectionModel):
    """Section `tensor_parallel.tp`."""

    rows = section_of(TensorRanks, TENSOR_RANKS)
    title = "tp"
    tp_size: int


@final
class TPTrainingConfig(SectionModel):
    """Section `tensor_parallel`; its `tp` is the attribute `tensor_parallel`."""

    rows = section_of(TensorParallel, TENSOR_PARALLEL)
    defaults: ClassVar[Mapping[str, Any]] = {
        "dtype": torch.float16,
        "tp": TPConfig,
        "vocab_parallel_lm_head": None,
        "partition_config": None,
    }
    models: ClassVar[Mapping[str, type[SectionModel]]] = {"tp": TPConfig}
    attributes: ClassVar[Mapping[str, str]] = {"tp": "tensor_parallel"}
    title = "tensor_parallel"
    autotp_size: int
    tensor_parallel: TPConfig


def get_tensor_parallel_config(ds_config: Mapping[str, Any]) -> TPTrainingConfig:
    """Return the section of a whole config; the defaults if it has none.  Raises as TPTrainingConfig does."""
    return TPTrainingConfig(**(ds_config.get("tensor_parallel") or {}))
