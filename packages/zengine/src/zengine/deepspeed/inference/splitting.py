"""Splitting a model for inference: layers over tensor-parallel ranks, experts over expert-parallel ranks.

Each rank checks sizes and plan by itself, before any communication; then ranks compare their models and plans.  The
plan of the layers comes from the config's `partition_config` or `injection_policy`, from the model (`tp_plan`), or is
inferred by running the model, which needs a small input (`dummy_inputs`) and memory for the whole model.  A written
plan is verified if the model is small.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
import zpartition
from zengine.build.agreement import compare, parameter_lines
from zengine.build.tensor_parallel import VERIFIED_NUMEL, Input, small_input
from zengine.deepspeed.comm import get_rank, get_world_size, init_distributed, is_initialized
from zengine.deepspeed.inference.parallel import NO_GROUP, ParallelGroup, Parallelism
from zpartition import tensor
from zpartition.tensor import TensorPlan

__all__ = ["Split", "degrees", "num_ranks", "plan_split", "written_plan"]

log = logging.getLogger("zengine")


@final
@attrs.frozen(eq=False)
class Split:
    """Split of a model, planned and checked by this rank alone."""

    layers: ParallelGroup = NO_GROUP  # ranks that split layers by `plan`
    experts: ParallelGroup = NO_GROUP  # ranks that shard experts
    plan: TensorPlan | None = None  # None: layers are not split
    is_inferred: bool = False  # the plan is a proposal that `verified` may change
    inputs: Input | None = None  # to verify a plan with

    @property
    def is_split(self) -> bool:
        """Whether there are several ranks."""
        return _has_many_ranks(self.layers) or _has_many_ranks(self.experts)

    def agree(self, module: nn.Module) -> None:
        """Raise RanksDisagree if ranks of a group have different models or plans."""
        rules = [] if self.plan is None else [repr(rule) for rule in self.plan.rules]
        mine = {"plans of layers": rules, "parameters": parameter_lines(module)}
        for group_spec in (self.layers, self.experts):
            if _has_many_ranks(group_spec):
                compare(mine, _group(group_spec))

    def verified(self, module: nn.Module) -> Split:
        """Return the split with its plan verified, if possible.  Raises ValueError if it fails; collective."""
        if self.plan is None or self.inputs is None:
            return self
        args, kwargs = self.inputs
        if self.is_inferred:
            fitted = tensor.infer_verified_plan(module, _group(self.layers), *args, kwargs=kwargs)
            return attrs.evolve(self, plan=attrs.evolve(fitted, grain=self.plan.grain))
        if sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL:
            tensor.verify(module, self.plan, _group(self.layers), *args, kwargs=kwargs)
        return self

    def by_outputs(self) -> Split:
        """Return the split with layers whose results equal those of the whole quantized layers, bit for bit."""
        return self if self.plan is None else attrs.evolve(self, plan=tensor.by_outputs(self.plan))

    def apply(self, module: nn.Module) -> None:
        """Keep this rank's part of `module`, in place; collective."""
        if self.plan is not None:
            tensor.parallelize(module, self.plan, _group(self.layers))
        if _has_many_ranks(self.experts):
            from zpartition import experts

            experts.distribute(module, _group(self.experts))


def plan_split(module: nn.Module, parallelism: Parallelism) -> Split:
    """Plan the split of `module`; initialize torch.distributed if it needs several ranks.

    Raises:
        ValueError: sizes that do not match the ranks, a model with another split, or a plan that does not fit.
    """
    for group_spec, what in ((parallelism.tensor, "tensor"), (parallelism.experts, "expert")):
        _check_size(group_spec, what)
    if not (_has_many_ranks(parallelism.tensor) or _has_many_ranks(parallelism.experts)):
        return Split()
    init_distributed()
    layers, stacks = _pending(parallelism.tensor, [zpartition.model_parallel_group_of(module)], "layers"), NO_GROUP
    if _has_many_ranks(parallelism.experts):
        stacks = _pending(parallelism.experts, [zpartition.expert_ranks_of(module)], "experts")
    if _has_many_ranks(stacks):
        _check_experts(module, _size_and_rank(stacks)[0], parallelism)
    if not _has_many_ranks(layers):
        return Split(experts=stacks)
    return attrs.evolve(_plan_layers(module, parallelism), experts=stacks)


def degrees(parallelism: Parallelism) -> tuple[int, int]:
    """Return how many ranks split the layers, and how many share the experts."""
    given = ((each.size, _given_group(each)) for each in (parallelism.tensor, parallelism.experts))
    tensor_ranks, expert_ranks = (max(1, size) if group is None else zcomm.group_size(group) for size, group in given)
    return tensor_ranks, expert_ranks


def num_ranks() -> int:
    """Return the ranks of this run, also before they are connected."""
    return get_world_size() if is_initialized() else zcomm.detect().world_size


def _check_size(group_spec: ParallelGroup, what: str) -> None:
    """Raise ValueError if the size does not match the given group, or does not divide the world size."""
    given = _given_group(group_spec)
    if given is not None and group_spec.size not in (0, zcomm.group_size(given)):
        raise ValueError(
            f"{group_spec.key} = {group_spec.size}, but the given {what} group has {zcomm.group_size(given)} ranks: "
            "remove one of them, or make them agree."
        )
    total = num_ranks()
    if given is None and group_spec.size > 1 and total % group_spec.size:
        fitting = ", ".join(str(size) for size in range(1, total + 1) if total % size == 0)
        raise ValueError(
            f"{group_spec.key} = {group_spec.size} does not divide the {total} rank{'s' * (total != 1)} of this run: "
            f"choose one of {fitting}, or start a multiple of {group_spec.size} (torchrun --nproc-per-node "
            f"{group_spec.size} ...)."
        )


def _given_group(group_spec: ParallelGroup) -> ProcessGroup | None:
    """Return the group that the caller passed, directly or by an mpu."""
    found: ProcessGroup | None = group_spec.group
    if found is not None or group_spec.mpu is None:
        return found
    name = zcomm.mpu_getter(group_spec.mpu, "tensor", "group")
    if not name:
        raise ValueError(
            f"mpu= is a {type(group_spec.mpu).__name__} without get_model_parallel_group() and "
            "get_tensor_model_parallel_group(): pass one that has either, or tensor_parallel={'tp_group': group}."
        )
    of: Callable[[], ProcessGroup | None] = getattr(group_spec.mpu, name)
    return of()


def _group(group_spec: ParallelGroup) -> ProcessGroup | None:
    found = _given_group(group_spec)
    return found if found is not None or group_spec.size <= 1 else zcomm.consecutive_group(group_spec.size)


def _has_many_ranks(group_spec: ParallelGroup) -> bool:
    found = _given_group(group_spec)
    return group_spec.size > 1 if found is None else zcomm.group_size(found) > 1


def _pending(group_spec: ParallelGroup, cells: Sequence[zpartition.ModelParallelGroup], what: str) -> ParallelGroup:
    """Return `group_spec`, or NO_GROUP if the model is split over these ranks already.

    Raises ValueError if it is split over other ranks.
    """
    done = next((_ranks(cell.group) for cell in cells if cell.size > 1), None)
    if done is None or not _has_many_ranks(group_spec):
        return group_spec
    given = _given_group(group_spec)
    first = get_rank() // max(group_spec.size, 1) * group_spec.size
    wanted = list(range(first, first + group_spec.size)) if given is None else _ranks(given)
    if done != wanted:
        raise ValueError(
            f"the model's {what} are already split over ranks {done}, and the config asks for ranks {wanted}: a "
            "model can be split once. Remove the sizes to use it as it is, or pass a whole model."
        )
    log.warning("init_inference: the model's %s are already split over ranks %s and stay so", what, done)
    return NO_GROUP


def _size_and_rank(group_spec: ParallelGroup) -> tuple[int, int]:
    """Return (number of ranks, rank among them), without communication."""
    given = _given_group(group_spec)
    if given is not None:
        return zcomm.group_size(given), zcomm.group_rank(given)
    return group_spec.size, get_rank() % group_spec.size


def _ranks(group: ProcessGroup | None) -> list[int]:
    return list(range(get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _plan_layers(module: nn.Module, parallelism: Parallelism) -> Split:
    """Plan the layers, with all checks that one rank can make."""
    is_real = not any(param.is_meta for param in module.parameters())
    inputs = small_input(module, lambda: None, _device(module)) if is_real else None
    plan = written_plan(module, parallelism)
    if plan is None and inputs is None:
        reason = (
            "it has no dummy_inputs (the arguments of its forward by name)" if is_real else "it is on the meta device"
        )
        raise ValueError(
            f"the split of {type(module).__name__}'s layers is inferred by running it on a small input, but "
            f"{reason}. Name the layers: injection_policy={{Block: (names of the layers whose outputs are added to "
            "the residual stream,)}, or tensor_parallel={'partition_config': ...}."
        )
    proposal = plan if plan is not None else _infer_plan(module, inputs)
    proposal = attrs.evolve(proposal, grain=max(parallelism.grain, proposal.grain))
    tensor.resolve(proposal, module, *_size_and_rank(parallelism.tensor))
    return Split(layers=parallelism.tensor, plan=proposal, is_inferred=plan is None, inputs=inputs)


def written_plan(module: nn.Module, parallelism: Parallelism) -> TensorPlan | None:
    """Return the plan in the config or in the model; None if neither has one."""
    if isinstance(parallelism.plan, TensorPlan):
        return parallelism.plan
    if parallelism.plan:
        return tensor.read_layer_specs(parallelism.plan, module)
    if parallelism.policy:
        return tensor.read_injection_policy(parallelism.policy, module, _observed_plan(module))
    own = tensor.find_tp_plan(module)
    return tensor.read_tp_plan(own, module) if own else None


def _infer_plan(module: nn.Module, inputs: Input | None) -> TensorPlan:
    args, kwargs = inputs or ((), {})
    return tensor.infer_plan(module, *args, kwargs=kwargs)


def _observed_plan(module: nn.Module) -> TensorPlan | None:
    """Return the plan that running the model shows; None if it cannot run or shows none."""
    given: Mapping[str, Any] = getattr(module, "dummy_inputs", None) or {}
    try:
        return tensor.infer_plan(module, kwargs=given) if given else None
    except ValueError:  # found no pair of layers to split
        return None


def _check_experts(module: nn.Module, size: int, parallelism: Parallelism) -> None:
    """Raise ValueError if `size` ranks cannot shard the experts, or if moe_experts is wrong."""
    from zpartition import experts

    stacks = experts.divisible_experts(module, size)
    numbers = {path: experts.num_experts_of(stack) for path, stack in stacks.items()}
    for path, number in numbers.items():
        if parallelism.expert_counts and number not in parallelism.expert_counts:
            raise ValueError(
                f"moe_experts = {list(parallelism.expert_counts)}, but {path} has {number} experts: remove "
                "moe_experts; experts are found and counted."
            )


def _device(module: nn.Module) -> torch.device:
    return next((param.device for param in module.parameters()), torch.device("cpu"))
