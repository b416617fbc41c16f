"""`deepspeed.runtime.base_optimizer`: DeepSpeed's names on the optimizer that `initialize` returns.

DeepSpeed wraps the caller's optimizer.  Here the optimizer stays itself, and as long as the engine is open its class
is derived from its own and from the one of DeepSpeed's classes that DeepSpeed would have used for the config
(returned_optimizer.py).  So `isinstance` works with both, and `optimizer.optimizer` is the optimizer.

The properties read the engine's parts when they are asked: they cost nothing in a step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm
from zengine.deepspeed.runtime.fp16.loss_scaler import LossScaleConfig, LossScalerBase
from zpartition import safe_get_full_fp32_param, safe_get_local_grad

if TYPE_CHECKING:
    from torch.nn import Parameter

    import zpartition
    from zengine.config import Plan

__all__ = ["DeepSpeedOptimizer", "EngineFacts", "ZeROOptimizer", "joined"]


@attrs.define(eq=False)
class EngineFacts:
    """What the names read; the optimizer's attribute `engine_facts`.  Does not keep the engine's memory alive."""

    plan: Plan
    loss_scaler: LossScalerBase  # over the engine's scaler
    find_partition: weakref.ref[zpartition.Partition]
    mpu: Any = None
    overflow: bool = False  # the last boundary skipped the update
    grad_norm: float = 0.0  # of the last boundary
    cleared: list[list[Tensor]] = attrs.field(factory=list)  # parameters of the groups, while those are empty

    @property
    def partition(self) -> zpartition.Partition:
        """Partition of the engine.  Raises RuntimeError if the engine was deleted."""
        found = self.find_partition()
        if found is None:
            raise RuntimeError("the engine of this optimizer was deleted: keep a reference to it while you train")
        return found


class DeepSpeedOptimizer:
    """Optimizer of an engine; `deepspeed.initialize` makes it from the caller's or the config's."""

    __slots__ = ()
    engine_facts: EngineFacts
    param_groups: list[dict[str, Any]]
    stands_for: type[torch.optim.Optimizer]  # its own class

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError(
            f"{type(self).__name__} is made by deepspeed.initialize(optimizer=...), for the config's precision and "
            "ZeRO stage; pass your optimizer there"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles have the optimizer's own class."""
        reduced: Any = object.__reduce_ex__(self, protocol)
        _, _, *rest = reduced
        return object.__new__, (self.stands_for,), *rest

    # -- the optimizer itself --------------------------------------------------------------------

    @property
    def optimizer(self) -> Any:
        """This optimizer: there is no wrapper."""
        return self

    @property
    def overflow(self) -> bool:
        """True if the last boundary skipped the update."""
        return self.engine_facts.overflow

    @property
    def clip_grad(self) -> float:
        """Norm that gradients are clipped to; 0: off."""
        return self.engine_facts.plan.clip_norm

    @property
    def _global_grad_norm(self) -> float:
        return self.engine_facts.grad_norm

    @property
    def mpu(self) -> Any:
        """The caller's `mpu`."""
        return self.engine_facts.mpu

    # -- loss scale ------------------------------------------------------------------------------

    @property
    def loss_scaler(self) -> LossScalerBase:
        """Loss scale, over the engine's scaler."""
        return self.engine_facts.loss_scaler

    @property
    def dynamic_loss_scale(self) -> bool:
        """True if the loss scale moves."""
        return self.loss_scaler.dynamic

    @property
    def loss_scale(self) -> float:
        """Factor of the next loss.  Can be set if it moves."""
        return self.loss_scaler.cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def cur_scale(self) -> float:
        """`loss_scale`."""
        return self.loss_scaler.cur_scale

    @cur_scale.setter
    def cur_scale(self, value: float) -> None:
        self.loss_scaler.cur_scale = value

    @property
    def cur_iter(self) -> int:
        """Boundaries since the engine was made; 0 for a constant scale."""
        return self._scale_number("cur_iter", 0)

    @property
    def last_overflow_iter(self) -> int:
        """Number of the last boundary that overflowed; -1: none."""
        return self._scale_number("last_overflow_iter", -1)

    @property
    def scale_factor(self) -> float:
        """Factor by which the loss scale moves; 1 for a constant one."""
        return float(getattr(self.loss_scaler, "scale_factor", 1.0))

    @property
    def scale_window(self) -> int:
        """Clean boundaries until the loss scale grows; 0 for a constant one."""
        return self._scale_number("scale_window", 0)

    @property
    def min_loss_scale(self) -> float:
        """The loss scale does not fall below it."""
        return float(getattr(self.loss_scaler, "min_scale", self.loss_scaler.cur_scale))

    @property
    def loss_scale_config(self) -> LossScaleConfig:
        """The numbers above, at this moment."""
        dtype = torch.float16 if self.engine_facts.plan.scales_losses else torch.float32
        found = LossScaleConfig(dtype, self.dynamic_loss_scale, self.cur_scale, None)
        found.cur_scale, found.cur_iter = self.cur_scale, self.cur_iter
        if found.dynamic_loss_scale:
            found.last_overflow_iter, found.scale_window = self.last_overflow_iter, self.scale_window
            found.min_loss_scale = self.min_loss_scale
        return found

    def _scale_number(self, name: str, default: int) -> int:
        return int(getattr(self.loss_scaler, name, default))

    # -- tensors ---------------------------------------------------------------------------------

    @property
    def fp16_groups(self) -> list[list[Parameter]]:
        """The module's trained parameters, by parameter group."""
        partition = self.engine_facts.partition
        group_of = {slot.name: bucket.group for bucket in partition.layout.buckets for slot in bucket.slots}
        found: list[list[Parameter]] = [[] for _ in self.param_groups]
        for name, param in partition.params.items():
            found[group_of[name]].append(param)
        return found

    @property
    def bit16_groups(self) -> list[list[Parameter]]:
        """`fp16_groups`."""
        return self.fp16_groups

    @property
    def fp32_groups_flat(self) -> list[Tensor]:
        """Masters that this rank updates, flat, by parameter group: the tensor itself if a group has only one."""
        return [joined(group["params"]) for group in self.param_groups]

    @property
    def fp32_groups(self) -> list[list[Tensor]]:
        """Whole masters of `fp16_groups`, as copies.  A collective above stage 0."""
        return [[safe_get_full_fp32_param(param) for param in group] for group in self.fp16_groups]

    def refresh_fp32_params(self) -> None:
        """Copy the module's weights into the masters, after an edit of the weights."""
        for storage in self.engine_facts.partition.storages:
            storage.refresh_master()

    def get_lr(self) -> float:
        """Return the learning rate of the first parameter group."""
        return float(self.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of all parameter groups."""
        for group in self.param_groups:
            group["lr"] = lr


class ZeROOptimizer(DeepSpeedOptimizer):
    """Optimizer of an engine that shards its states."""

    __slots__ = ()

    @property
    def single_partition_of_fp32_groups(self) -> list[Tensor]:
        """`fp32_groups_flat`."""
        return self.fp32_groups_flat

    @property
    def dp_process_group(self) -> ProcessGroup | None:
        """Process group of the ranks that shard the states."""
        return self.engine_facts.partition.group

    @property
    def params_in_partition(self) -> list[list[Parameter]]:
        """The module's parameters of which this rank updates elements, by parameter group."""
        return self._of_rank(is_here=True)

    @property
    def params_not_in_partition(self) -> list[list[Parameter]]:
        """The module's parameters that other ranks update, by parameter group."""
        return self._of_rank(is_here=False)

    def _of_rank(self, *, is_here: bool) -> list[list[Parameter]]:
        partition = self.engine_facts.partition
        found: list[list[Parameter]] = [[] for _ in self.param_groups]
        for storage in partition.storages:
            mine = {piece.slot.name for piece in storage.pieces(partition.rank)}
            for slot, param in zip(storage.bucket.slots, storage.params):
                if (slot.name in mine) is is_here:
                    found[storage.bucket.group].append(param)
        return found

    @property
    def partition_count(self) -> list[int]:
        """Ranks that shard the states, by parameter group."""
        return [self.engine_facts.plan.parallel.gradient_ranks] * len(self.param_groups)

    @property
    def nccl_start_alignment_factor(self) -> int:
        """Parts of the flat weights begin at multiples of this number of elements: 4 bytes of a 16-bit dtype."""
        return 2

    @property
    def averaged_gradients(self) -> dict[int, list[Tensor]]:
        """Reduced gradients of this rank's parts of `fp16_groups`, by parameter group, from backward to step.

        Copies, without the loss scale; {} if there are no gradients.
        """
        found: dict[int, list[Tensor]] = {}
        for index, group in enumerate(self.fp16_groups):
            parts = [part for param in group if (part := safe_get_local_grad(param)) is not None and part.numel()]
            if parts:
                found[index] = parts
        return found

    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Return True if a reduced gradient is not finite on some rank; False without gradients.  All ranks call.

        partition_gradients: ignored; a gradient that is not reduced yet does not count.
        """
        partition = self.engine_facts.partition
        kept = [gradient.kept for gradient in partition.reducer.gradients if gradient.kept is not None]
        flag = torch.zeros(1, device=partition.device)
        if not all(bool(torch.isfinite(each).all()) for each in kept):
            flag.fill_(1.0)
        zcomm.all_reduce(flag, partition.group, op="max", label="overflow")
        for others in (partition.mp_group, partition.pipeline_stages):
            if others.size > 1:
                zcomm.all_reduce(flag, others.group, op="max", label="overflow")
        return bool(flag.item())

    def check_overflow(self, partition_gradients: bool = True) -> None:
        """Set `overflow` to `has_overflow()`; the next boundary sets it again.  All ranks call."""
        self.engine_facts.overflow = self.has_overflow(partition_gradients)

    def _clear_fp32_optimizer_param_groups(self) -> None:
        """Empty the parameter groups, until the function below is called."""
        groups = self.param_groups
        self.engine_facts.cleared = self.engine_facts.cleared or [group["params"] for group in groups]
        for group in groups:
            group["params"] = []

    def _set_fp32_optimizer_param_groups(self) -> None:
        """Give the parameter groups their masters again."""
        for group, params in zip(self.param_groups, self.engine_facts.cleared):
            group["params"] = params
        self.engine_facts.cleared = []


def joined(parts: list[Tensor]) -> Tensor:
    """Return the parts in one flat tensor: the part itself if there is only one."""
    flat = [part.detach().reshape(-1) for part in parts]
    return parts[0] if len(parts) == 1 else torch.cat(flat) if flat else torch.empty(0)
