"""`deepspeed.runtime.tensor_parallel`: the settings of tensor parallelism."""

from __future__ import annotations

from zengine.deepspeed.runtime.tensor_parallel.config import (
    AUTOTP_MODE,
    TPConfig,
    TPTrainingConfig,
    get_tensor_parallel_config,
)

__all__ = ["AUTOTP_MODE", "TPConfig", "TPTrainingConfig", "get_tensor_parallel_config"]
