"""Norms, clipping and overflow checks of `deepspeed.runtime.utils`, for code that works on gradients itself.

Engines use none of these: zprecision reads norm and finiteness of sharded gradients in one pass.  Here a tensor is
what this rank holds; with an `mpu`, its model-parallel ranks hold other parts.  Norms are float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from zengine.deepspeed.accelerator import get_accelerator
from zengine.deepspeed.comm import ReduceOp, all_reduce, barrier, get_world_size
from zengine.deepspeed.moe.utils import is_moe_param
from zengine.deepspeed.utils import groups
from zengine.deepspeed.utils.bwc import (
    bwc_pipeline_parallel_group,
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_rank,
)

__all__ = [
    "CheckOverflow",
    "clip_grad_norm_",
    "clip_tensors_by_global_norm",
    "combine_grad_norm_groups",
    "get_flattened_grad_norm",
    "get_global_norm",
    "get_global_norm_of_tensors",
    "get_grad_norm",
    "get_grad_zeros",
    "get_norm_with_moe_layers",
    "get_weight_norm",
    "has_inf_or_nan",
    "is_invalid_grad_norm",
    "is_model_parallel_parameter",
    "mask_nan_or_inf_with_val_inplace",
]

_EPSILON = 1e-6  # beside a norm that divides


def is_model_parallel_parameter(p: Any) -> bool:
    """Return True if a parameter has Megatron's mark of a split one."""
    return bool(getattr(p, "model_parallel", False) or getattr(p, "tensor_model_parallel", False))


def has_inf_or_nan(x: Tensor) -> Tensor:
    """Return whether a dense or sparse tensor has a non-finite value, () bool on its device."""
    if x.is_sparse:
        x = x.coalesce().values()
    if x.numel() == 0:
        return torch.tensor(False, device=x.device)
    smallest, largest = torch.aminmax(x)
    return ~(torch.isfinite(smallest) & torch.isfinite(largest))


def is_invalid_grad_norm(norm: Any) -> bool:
    """Return True for a norm that is negative (DeepSpeed's mark of an overflow), infinite or NaN."""
    return bool((~torch.isfinite(torch.as_tensor(norm)) | (torch.as_tensor(norm) < 0)).any())


@final
class CheckOverflow:
    """Checks gradients for non-finite values over all ranks that share an update.

    param_groups: lists of parameters.  mpu: check over its model-parallel ranks.  zero_reduce_scatter: over all.
    deepspeed: an engine; its ranks disagree only if `enable_backward_allreduce` is False.
    """

    def __init__(
        self,
        param_groups: Iterable[Iterable[Tensor]] | None = None,
        mpu: Any = None,
        zero_reduce_scatter: bool = False,
        deepspeed: Any = None,
    ) -> None:
        self.mpu, self.zero_reduce_scatter, self.deepspeed = mpu, zero_reduce_scatter, deepspeed
        self.params = None if not param_groups else [param for group in param_groups for param in group]
        self.has_moe_params = any(map(is_moe_param, self.params or ()))

    def check(self, param_groups: Iterable[Iterable[Tensor]] | None = None) -> bool:
        """Return True if a gradient of the groups, by default of those given at first, is not finite on some rank."""
        if param_groups is None:
            assert self.params is not None, "self.params and param_groups both cannot be none"
            return self.has_overflow(self.params)
        params = [param for group in param_groups for param in group]
        return self.has_overflow(params, has_moe_params=any(map(is_moe_param, params)))

    def check_using_norm(self, norm_group: Iterable[Any], reduce_overflow: bool = True) -> bool:
        """Return True if one of the norms is invalid, on this or, with `reduce_overflow` or an mpu, on any rank."""
        flag = _flag(any(map(is_invalid_grad_norm, norm_group)))
        if self.has_moe_params:
            _maximum(flag, groups._get_max_expert_parallel_group())
        if self.mpu is not None:
            _maximum(flag, self.mpu.get_model_parallel_group())
        elif reduce_overflow:
            _maximum(flag, None)
            barrier()
        return bool(flag.item())

    def has_overflow_serial(self, params: Iterable[Tensor]) -> bool:
        """Return True if a gradient is not finite on this rank."""
        return any(bool(has_inf_or_nan(param.grad)) for param in params if param.grad is not None)

    def has_overflow(self, params: Iterable[Tensor], has_moe_params: bool | None = None) -> bool:
        """Return True if a gradient is not finite on some rank of the update."""
        flag = _flag(self.has_overflow_serial(params))
        is_local = self.deepspeed is not None and not getattr(self.deepspeed, "enable_backward_allreduce", True)
        if self.has_moe_params if has_moe_params is None else has_moe_params:
            _maximum(flag, groups._get_max_expert_parallel_group())
        if self.zero_reduce_scatter or (is_local and self.mpu is None):
            _maximum(flag, None)
        elif self.mpu is not None:
            if is_local:
                _maximum(flag, self.mpu.get_data_parallel_group())
            _maximum(flag, self.mpu.get_model_parallel_group())
        return bool(flag.item())


def get_global_norm(norm_list: Iterable[float]) -> float:
    """Return the norm of parts with these norms; infinity if one is invalid."""
    norms = [float(norm) for norm in norm_list]
    return math.inf if any(map(is_invalid_grad_norm, norms)) else math.sqrt(sum(norm**2 for norm in norms))


def combine_grad_norm_groups(norm_groups: Iterable[Any], norm_type: float = 2) -> Tensor:
    """Return the norm of groups with these norms, () float; infinity if one is invalid."""
    norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in norm_groups])
    combined = torch.linalg.vector_norm(norms, ord=norm_type)
    return torch.where((~torch.isfinite(norms) | (norms < 0)).any(), torch.full_like(combined, math.inf), combined)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2, mpu: Any = None
) -> Tensor:
    """Scale the gradients in place to a norm of at most `max_norm`; return the norm before.

    The norm is over the mpu's model-parallel ranks, where an unmarked parameter counts once, and the mean over the
    data-parallel ranks, whose experts differ.  At stages 1 to 3 an engine's gradients are not in `.grad`:
    "gradient_clipping" of the config clips those.
    """
    params = [each for each in _as_list(parameters) if each.grad is not None]
    counted = [
        each.grad.detach()
        for each in params
        if each.grad is not None
        and (
            mpu is None
            or norm_type == math.inf
            or mpu.get_model_parallel_rank() == 0
            or is_model_parallel_parameter(each)
        )
    ]
    total = _combined(counted, float(norm_type), _group_of(mpu))
    replicas = groups._get_data_parallel_group()
    total = total / float(get_world_size(replicas))
    all_reduce(total, group=replicas)
    factor = torch.clamp(float(max_norm) / (total + _EPSILON), max=1.0)
    for each in params:
        assert each.grad is not None
        each.grad.detach().mul_(factor.to(each.grad.device))
    return total


def get_flattened_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    norm_type: float = 2,
    mpu: Any = None,
    grad_norm_mask: Sequence[Tensor] | None = None,
) -> float:
    """Return the norm of flat gradients over the mpu's model-parallel ranks; -1 if it is not finite.

    grad_norm_mask: for each parameter (n, 2) int64, ranges of elements that do not count.
    """
    counted = []
    for index, each in enumerate(each for each in _as_list(parameters) if each.grad is not None):
        assert each.grad is not None
        grad = each.grad.detach().float().clone()
        for start, stop in grad_norm_mask[index].tolist() if grad_norm_mask is not None else ():
            grad[start:stop] = 0
        counted.append(grad)
    return _or_minus_one(_combined(counted, float(norm_type), _group_of(mpu)))


def get_grad_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the gradients over the mpu's model-parallel ranks; -1 if it is not finite.

    A replicated parameter counts on the first of these ranks only.
    """
    counted = [each.grad.detach() for each in _as_list(parameters) if each.grad is not None and _counts(each, mpu)]
    return _or_minus_one(_combined(counted, float(norm_type), _group_of(mpu)))


def get_grad_zeros(parameters: Tensor | Iterable[Tensor], mpu: Any = None) -> float:
    """Return the number of zeros in the gradients, over the mpu's model-parallel ranks."""
    counted = [each.grad for each in _as_list(parameters) if each.grad is not None and _counts(each, mpu)]
    zeros = sum(grad.numel() - int(torch.count_nonzero(grad)) for grad in counted)
    total = torch.tensor([float(zeros)], device=get_accelerator().current_device_name())
    if mpu is not None:
        all_reduce(total, group=mpu.get_model_parallel_group())
    return float(total.item())


def get_weight_norm(parameters: Tensor | Iterable[Tensor], norm_type: float = 2, mpu: Any = None) -> float:
    """Return the norm of the weights over the mpu's model-parallel ranks; -1 if it is not finite."""
    is_largest = norm_type == math.inf
    counted = [each.detach() for each in _as_list(parameters) if is_largest or _counts(each, mpu)]
    return _or_minus_one(_combined(counted, float(norm_type), _group_of(mpu)))


def mask_nan_or_inf_with_val_inplace(input: Tensor, device: Any = None, val: float = -1.0) -> None:
    """Replace non-finite values by `val` in place."""
    input.masked_fill_(~torch.isfinite(input), val)


def get_global_norm_of_tensors(
    input_tensors: Sequence[Tensor], norm_type: float = 2, mpu: Any = None, moe_ep_group: Any = None
) -> Tensor:
    """Return the norm of tensors, () float32; -1 if it is not finite.

    mpu: over its model-parallel ranks; of experts, which tensor ranks hold whole, over its pipeline's.
    moe_ep_group: and over these ranks, which shard the experts.
    """
    assert all(map(torch.is_tensor, input_tensors)), "expected list of only tensors"
    if moe_ep_group is None or groups._get_expert_model_parallel_world_size() > 1:
        others = _group_of(mpu)
    else:
        has_stages = mpu is not None and bwc_pipeline_parallel_world_size(mpu) > 1
        others = bwc_pipeline_parallel_group(mpu) if has_stages else None
    members = [group for group in (others, moe_ep_group) if group is not None]
    total = _combined(list(input_tensors), float(norm_type), *members).to(input_tensors[0].device)
    mask_nan_or_inf_with_val_inplace(total)
    return total


def clip_tensors_by_global_norm(
    input_tensors: Sequence[Tensor],
    max_norm: float = 1.0,
    global_norm: Any = None,
    mpu: Any = None,
    eps: float = _EPSILON,
) -> Any:
    """Scale the tensors in place to a norm of at most `max_norm`; return the norm before, `global_norm` if given."""
    norm = get_global_norm_of_tensors(input_tensors, mpu=mpu) if global_norm is None else global_norm
    factor = max_norm / (norm + eps)
    if factor < 1:
        for tensor in input_tensors:
            tensor.detach().mul_(factor)
    return norm


def get_norm_with_moe_layers(
    non_expert_norm: Any, mpu: Any, expert_tensors: dict[str, Sequence[Tensor]], norm_type: float = 2
) -> float:
    """Return the norm of a model with experts; -1 if a part is not finite.

    expert_tensors: gradients of the experts by the name of their expert-parallel group.
    """
    norms = [float(non_expert_norm)]
    for name, tensors in expert_tensors.items():
        group = groups._get_expert_parallel_group(name)
        norms.append(float(get_global_norm_of_tensors(tensors, norm_type, mpu, group)))
    if any(map(is_invalid_grad_norm, norms)):
        return -1
    found = float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), ord=float(norm_type)))
    return found if math.isfinite(found) else -1


def _as_list(tensors: Tensor | Iterable[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _group_of(mpu: Any) -> Any:
    return None if mpu is None else mpu.get_model_parallel_group()


def _counts(param: Any, mpu: Any) -> bool:
    """Return False for a copy that another model-parallel rank counts."""
    is_copy = bwc_tensor_model_parallel_rank(mpu) > 0 and not is_model_parallel_parameter(param)
    return not is_copy and not getattr(param, "ds_pipe_replicated", False)


def _combined(tensors: Sequence[Tensor], norm_type: float, *over: Any) -> Tensor:
    """Return the norm of all tensors, over the ranks of the groups that are not None; () float32 on the device."""
    device, is_largest = get_accelerator().current_device_name(), norm_type == math.inf
    parts = [torch.linalg.vector_norm(tensor.float(), ord=norm_type).to(device) for tensor in tensors]
    norms = torch.stack(parts) if parts else torch.zeros(1, device=device)
    total = norms.max() if is_largest else norms.pow(norm_type).sum()
    for group in over:
        if group is not None:
            all_reduce(total, op=ReduceOp.MAX if is_largest else ReduceOp.SUM, group=group)
    return total if is_largest else total.pow(1.0 / norm_type)


def _or_minus_one(norm: Tensor) -> float:
    value = float(norm)
    return value if math.isfinite(value) else -1


def _flag(value: bool) -> Tensor:
    return torch.tensor([float(value)], device=get_accelerator().current_device_name())


def _maximum(flag: Tensor, group: Any) -> None:
    all_reduce(flag, op=ReduceOp.MAX, group=group)
