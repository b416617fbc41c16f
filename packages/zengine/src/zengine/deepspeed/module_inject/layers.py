"""`deepspeed.module_inject.layers`: split linear layers, made by hand from a whole layer and a tensor group.

    column = LinearLayer(whole, group)        # this rank's outputs, from whole inputs
    row = LinearAllreduce(whole, group)       # whole outputs, from this rank's inputs

`initialize` and `tp_model_init` split whole models by `zpartition.tensor` and do not use these.  A layer takes over
the parameters of the whole one, which lose the other ranks' parts; `weight.gather_params` and `weight._tp_partition`
restore and drop them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from zengine.deepspeed.module_inject.modes import (
    get_auto_tp_mode,
    is_autotp_training_mode,
    set_autotp_mode,
)
from zengine.deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from zpartition import ModelParallelGroup, tensor

__all__ = [
    "EmbeddingLayer",
    "GatherReplacedLayerParams",
    "LinearAllreduce",
    "LinearAllreduceWithReplicatedInput",
    "LinearLayer",
    "LmHeadLinearAllreduce",
    "Normalize",
    "OPTEmbedding",
    "RMSNormalize",
    "TensorParallel_Layer",
    "VocabParallelLinear",
    "get_auto_tp_mode",
    "is_autotp_training_mode",
    "set_autotp_mode",
]

ALONE = ModelParallelGroup(None)


class TensorParallel_Layer(nn.Module, ABC):  # noqa: N801  DeepSpeed's name
    """Base of the split layers."""

    tp_overlap_comm = False  # accepted; backward sends the gradient of the input at once
    dim: int  # dim of the weight that is split
    weight: Any  # Parameter
    bias: Any  # Parameter or None

    def __init__(self, module: Any, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        """Take weight and bias of `module`.

        mp_group: the tensor ranks; None: no split.
        name: name of the layer; tp_meta: see `get_shard_size`.
        """
        super().__init__()
        self.mp_group = mp_group
        self._ranks = ALONE if mp_group is None else ModelParallelGroup.of(mp_group)
        self.tp_world_size = self.world_size = self._ranks.size
        self.tp_index = self.rank = self._ranks.rank
        self.name = kwargs.get("name") or getattr(type(self), "layer_name", None)
        self.tp_meta: AutoTPMeta = kwargs.get("tp_meta") or AutoTPMeta()
        self.weight, self.bias = module.weight, module.bias
        sizes = get_shard_size_list(module.weight.shape[self.dim], self._ranks.size, self.tp_meta, self.name)
        self._partition_sizes = tuple(sizes)
        if not kwargs.get("skip_partition"):
            self._tp_partition([self.weight, self.bias])
        self._mark()

    @abstractmethod
    def forward(self, input: Tensor) -> Tensor:
        """Compute the layer."""

    def split_parameters(self) -> list[Any]:
        """Return the parameters of which this rank has a part."""
        return [self.weight]

    def is_training_mode(self) -> bool:
        """Return True if layers are made for training."""
        return is_autotp_training_mode()

    def gather_params(self, params_list: Sequence[Any]) -> None:
        """Make the split ones of [weight, bias] whole on every rank.  A collective of the tensor ranks."""
        for param in self._split_of(params_list):
            param.data = self._whole(param.data)

    def _tp_partition(self, params_list: Sequence[Any]) -> None:
        """Keep this rank's parts of [weight, bias]."""
        begin = sum(self._partition_sizes[: self._ranks.rank])
        for param in self._split_of(params_list):
            part = param.data.narrow(self._dim_of(param), begin, self._partition_sizes[self._ranks.rank])
            param.data = part.clone(memory_format=torch.contiguous_format)

    def _split_of(self, params_list: Sequence[Any]) -> list[Any]:
        own = self.split_parameters()
        return [param for param in params_list if param is not None and any(param is each for each in own)]

    def _dim_of(self, param: Tensor) -> int:
        return self.dim if param.dim() > 1 else 0

    def _whole(self, part: Tensor) -> Tensor:
        dim = self._dim_of(part)
        with torch.no_grad():
            joined = tensor.join_features(part.movedim(dim, -1).contiguous(), self._ranks, self._partition_sizes)
        return joined.movedim(-1, dim).contiguous()

    def _mark(self) -> None:
        """Set DeepSpeed's marks on the parameters; in the mode for inference they are frozen."""
        for param in (self.weight, self.bias):
            if param is not None and not is_autotp_training_mode():
                param.requires_grad = False
        for param in self.split_parameters():
            param.gather_params, param._tp_partition = self.gather_params, self._tp_partition
            param.tensor_model_parallel = param.ds_is_replaced_module = True

    def extra_repr(self) -> str:
        """Local sizes."""
        out, inner = self.weight.shape[-2:]
        return f"in_features={inner}, out_features={out}, bias={self.bias is not None}, dtype={self.weight.dtype}"


class LinearAllreduce(TensorParallel_Layer):
    """Split by inputs: takes this rank's features, returns the sum over the ranks; the bias is whole."""

    dim = 1

    def __init__(self, module: Any, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        super().__init__(module, mp_group, **kwargs)

    def forward(self, input: Tensor) -> Tensor:
        """(..., this rank's part of in) -> (..., out)."""
        y = F.linear(input, self.weight)
        y = tensor.reduce(y.contiguous(), self._ranks) if self._ranks.size > 1 else y
        return y if self.bias is None else y + self.bias


class LinearAllreduceWithReplicatedInput(LinearAllreduce):
    """The same for whole inputs, of which each rank takes its features."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., out).  Raises ValueError for another number of features."""
        if input.shape[-1] != sum(self._partition_sizes):
            raise ValueError(f"the layer takes {sum(self._partition_sizes)} features, got {list(input.shape)}")
        return super().forward(tensor.slice_features(input, self._ranks, self._partition_sizes))


@final
class LmHeadLinearAllreduce(LinearAllreduceWithReplicatedInput):
    """The same for an output head: its weight is copied first, so that a tied embedding stays whole."""

    layer_name = "lm_head"

    def __init__(self, module: Any, mp_group: ProcessGroup | None, **kwargs: Any) -> None:
        for name in ("weight", "bias"):
            param = getattr(module, name, None)
            if param is not None:
                setattr(module, name, nn.Parameter(param.detach().clone()))
        super().__init__(module, mp_group, **kwargs)


class LinearLayer(TensorParallel_Layer):
    """Split by outputs: takes whole inputs, returns this rank's features."""

    dim = 0

    def __init__(
        self,
        module: Any,
        mp_group: ProcessGroup | None = None,
        skip_partition: bool = False,
        gather_output: bool = False,
        **kwargs: Any,
    ) -> None:
        """skip_partition: `module` has this rank's part already.  gather_output: return all features."""
        self.gather_output = gather_output
        super().__init__(module, mp_group, skip_partition=skip_partition, **kwargs)

    def split_parameters(self) -> list[Any]:
        """Return weight and bias."""
        return [param for param in (self.weight, self.bias) if param is not None]

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) -> (..., this rank's part of out)."""
        x = tensor.copy(input, self._ranks) if self._ranks.size > 1 else input
        y = F.linear(x, self.weight, self.bias)
        return tensor.join_features(y, self._ranks, self._partition_sizes) if self.gather_output else y

    @classmethod
    def from_weights(
        cls,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        gather_output: bool = False,
    ) -> LinearLayer:
        """Make an unsplit layer of `weight` (out, in) and `bias`, or with new weights of `weight_shape`.

        Raises ValueError if both are missing.
        """
        shape = weight_shape if weight is None else weight.shape
        if shape is None:
            raise ValueError("from_weights needs weight= or weight_shape=, (out, in)")
        layer = nn.Linear(shape[1], shape[0], bias=bias is not None, dtype=dtype if weight is None else weight.dtype)
        if weight is not None:
            layer.weight.data = weight
        if bias is not None:
            layer.bias.data = bias
        return cls(layer, skip_partition=True, gather_output=gather_output)


@final
class VocabParallelLinear(LinearLayer):
    """An output head that keeps the logits of this rank's part of the vocabulary."""

    is_vocab_parallel_lm_head = True

    def __init__(self, module: Any, mp_group: ProcessGroup | None = None, **kwargs: Any) -> None:
        """Raises ValueError for fewer words than ranks."""
        super().__init__(module, mp_group, **kwargs)
        self.vocab_size = sum(self._partition_sizes)
        if min(self._partition_sizes) == 0:
            raise ValueError(f"a vocabulary of {self.vocab_size} cannot be split over {self.tp_world_size} ranks")
        self.vocab_start_index = sum(self._partition_sizes[: self.tp_index])
        self.vocab_end_index = self.vocab_start_index + self._partition_sizes[self.tp_index]


@final
class GatherReplacedLayerParams:
    """Context in which [weight, bias] of a split layer are whole."""

    def __init__(self, params: Iterable[Any] | Tensor, module: nn.Module, enabled: bool = True) -> None:
        """Do nothing inside unless `enabled` and one of `params` belongs to a split layer."""
        self.module = module
        self.params: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        self._split = [param for param in self.params if getattr(param, "ds_is_replaced_module", False)]
        self.enabled = enabled and bool(self._split)

    def __enter__(self) -> None:
        """Gather.  A collective of the tensor ranks."""
        if self.enabled:
            self._split[0].gather_params(self.params)

    def __exit__(self, *args: object) -> None:
        """Keep this rank's parts, with changes."""
        if self.enabled:
            self._split[0]._tp_partition(self.params)


class Normalize(nn.Module):
    """Layer norm with given or new weights."""

    def __init__(
        self,
        dim: int | None = None,
        dtype: torch.dtype = torch.float,
        eps: float = 1e-5,
        weight: Any = None,
        bias: Any = None,
    ) -> None:
        """weight, bias: parameters to use.  dim: size of new ones, if `weight` is missing."""
        super().__init__()
        whole = nn.LayerNorm(weight.shape[-1] if dim is None else dim, eps=eps, dtype=dtype)
        self.weight, self.bias = whole.weight if weight is None else weight, whole.bias if bias is None else bias
        self.norm, self.eps = whole, eps
        self.norm.weight, self.norm.bias = self.weight, self.bias

    def forward(self, input: Tensor) -> Tensor:
        """(..., dim) -> the same."""
        return F.layer_norm(input, input.shape[-1:], self.weight, self.bias, self.eps)


class RMSNormalize(nn.Module):
    """RMS norm, computed in float32."""

    def __init__(
        self, dim: int | None = None, dtype: torch.dtype = torch.float, eps: float = 1e-5, weight: Any = None
    ) -> None:
        """weight: the parameter to use.  dim: size of a new one, if it is missing."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim or 0, dtype=dtype)) if weight is None else weight
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., dim) -> the same."""
        scale = torch.rsqrt(hidden_states.float().square().mean(-1, keepdim=True) + self.eps)
        scaled = hidden_states * scale
        is_half = self.weight.dtype in (torch.float16, torch.bfloat16)
        return (scaled.to(self.weight.dtype) if is_half else scaled) * self.weight


class EmbeddingLayer(nn.Module):
    """Embedding with given or new weights."""

    def __init__(
        self,
        weight_shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.half,
        weight: Any = None,
        bias: Any = None,
    ) -> None:
        """weight: the parameter to use.  weight_shape: (words, width) of a new one.

        Raises ValueError without both.
        """
        super().__init__()
        if weight is None and weight_shape is None:
            raise ValueError("EmbeddingLayer needs weight= or weight_shape=, (words, width)")
        self.weight = nn.Parameter(torch.empty(*(weight_shape or ()), dtype=dtype)) if weight is None else weight

    def forward(self, input: Tensor) -> Tensor:
        """(...) int64 -> (..., width)."""
        return F.embedding(input, self.weight)


@final
class OPTEmbedding(EmbeddingLayer):
    """OPT's learned positions, which begin at row 2."""

    offset = 2

    def __init__(self, weight_shape: Sequence[int] | None = None, weight: Any = None, bias: Any = None) -> None:
        super().__init__(weight_shape, weight=weight)

    def forward(self, attention_mask: Tensor, past_key_values_length: int = 0, position_ids: Any = 0) -> Tensor:
        """(batch, tokens) mask -> (batch, tokens - past, width); padding has position -1."""
        mask = attention_mask.long()
        positions = (mask.cumsum(dim=1) * mask - 1)[:, past_key_values_length:]
        return super().forward(positions + self.offset)
