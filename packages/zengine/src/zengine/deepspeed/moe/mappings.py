"""`deepspeed.moe.mappings`: tokens to and from the tensor ranks of `deepspeed.utils.groups.mpu`."""

from __future__ import annotations

from torch import Tensor

from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.bwc import bwc_tensor_model_parallel_group
from zpartition import ModelParallelGroup, tensor

__all__ = ["drop_tokens", "gather_tokens"]


def drop_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Return this tensor rank's part of `input_`, which all tensor ranks have; backward all-gathers.

    Raises ValueError if the tokens do not divide.
    """
    ranks = _tensor_ranks()
    return input_ if ranks is None else tensor.slice_tokens(input_, ranks, dim)


def gather_tokens(input_: Tensor, dim: int = 0) -> Tensor:
    """Join the tensor ranks' parts; backward returns this rank's part of the gradient."""
    ranks = _tensor_ranks()
    return input_ if ranks is None else tensor.join_tokens(input_, ranks, dim)


def _tensor_ranks() -> ModelParallelGroup | None:
    """Return the tensor ranks; None if there is only one."""
    group = bwc_tensor_model_parallel_group(groups.mpu)
    ranks = None if group is None else ModelParallelGroup.of(group)
    return None if ranks is None or ranks.size == 1 else ranks
