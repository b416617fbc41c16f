"""Splits a model that is to answer over ranks: layers over tensor ranks, experts over expert ranks.

Everything that can be wrong is found by each rank alone, with the numbers, before anything is sent; ranks then
compare what they were given.  Which layer is split how comes from the config's `partition_config` or
`injection_policy`, from the model (`tp_plan`), or from its behaviour, which takes a small input (`dummy_inputs`) and
memory for the whole model.  What somebody wrote is tried where that is cheap.
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
from zengine.build.tensor_parallel import VERIFIED_NUMEL, Input, model_tp_plan, small_input
from zengine.deepspeed.comm import get_rank, get_world_size, init_distributed, is_initialized
from zengine.deepspeed.inference.parallel import NOBODY, Sharing, Wanted
from zpartition import tensor
from zpartition.tensor import TensorPlan

__all__ = ["Split", "planned", "written_plan"]

log = logging.getLogger("zengine")


@final
@attrs.frozen(eq=False)
class Split:
    """What is to be done with a model, decided and checked by this rank alone."""

    layers: Wanted = NOBODY  # over which ranks layers are split by `plan`
    experts: Wanted = NOBODY  # over which ranks experts are shared out; nothing is where they are not several
    plan: TensorPlan | None = None  # None: layers stay as they are
    is_inferred: bool = False  # the plan is a proposal, which running the model may change
    inputs: Input | None = None  # to try a plan with

    def agree(self, module: nn.Module) -> None:
        """Raises RanksDisagree if ranks that are to share the model have other ones, or other plans."""
        rules = [] if self.plan is None else [repr(rule) for rule in self.plan.rules]
        mine = {"plans of layers": rules, "parameters": parameter_lines(module)}
        for wanted in (self.layers, self.experts):
            if _is_several(wanted):
                compare(mine, _group(wanted))

    def settled(self, module: nn.Module) -> Split:
        """With the plan that has been tried, where it can be.  Raises ValueError if it fails; collective."""
        if self.plan is None or self.inputs is None:
            return self
        args, kwargs = self.inputs
        if self.is_inferred:
            fitted = tensor.infer_verified_plan(module, _group(self.layers), *args, kwargs=kwargs)
            return attrs.evolve(self, plan=attrs.evolve(fitted, grain=self.plan.grain))
        if sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL:
            tensor.verify(module, self.plan, _group(self.layers), *args, kwargs=kwargs)
        return self

    def carry_out(self, module: nn.Module) -> None:
        """Keep this rank's part of `module`, in place; collective."""
        if self.plan is not None:
            tensor.parallelize(module, self.plan, _group(self.layers))
        if _is_several(self.experts):
            from zpartition import experts

            experts.distribute(module, _group(self.experts))


def planned(module: nn.Module, sharing: Sharing) -> Split:
    """Return what becomes of `module`; joins the others (a process group) where several are asked for.

    Raises:
        ValueError: sizes that do not make the ranks, a model that is split otherwise, or what a plan has against it.
    """
    for wanted, what in ((sharing.tensor, "tensor"), (sharing.experts, "expert")):
        _refuse_number(wanted, what)
    if not (_is_several(sharing.tensor) or _is_several(sharing.experts)):
        return Split()
    init_distributed()
    layers, stacks = _to_do(sharing.tensor, [zpartition.model_parallel_group_of(module)], "layers"), NOBODY
    if _is_several(sharing.experts):
        stacks = _to_do(sharing.experts, list(zpartition.expert_shards_of(module).values()), "experts")
    if _is_several(stacks):
        _refuse_experts(module, _place(stacks)[0], sharing)
    if not _is_several(layers):
        return Split(experts=stacks)
    return attrs.evolve(_planned_layers(module, sharing), experts=stacks)


def _refuse_number(wanted: Wanted, what: str) -> None:
    """ValueError for a size that the ranks there are, or the group that was given, do not make."""
    given = _given(wanted)
    if given is not None and wanted.size not in (0, zcomm.group_size(given)):
        raise ValueError(
            f"{wanted.key} = {wanted.size}, and the {what} group that was given has {zcomm.group_size(given)} ranks: "
            "leave one of them out, or make them agree."
        )
    total = get_world_size() if is_initialized() else zcomm.detect().world_size
    if given is None and wanted.size > 1 and total % wanted.size:
        fitting = ", ".join(str(size) for size in range(1, total + 1) if total % size == 0)
        raise ValueError(
            f"{wanted.key} = {wanted.size} does not divide the {total} rank{'s' * (total != 1)} of this run: choose "
            f"one of {fitting}, or start a multiple of {wanted.size} (torchrun --nproc-per-node {wanted.size} ...)."
        )


def _given(wanted: Wanted) -> ProcessGroup | None:
    """The group that the caller has made, or an mpu of theirs."""
    found: ProcessGroup | None = wanted.group
    if found is not None or wanted.mpu is None:
        return found
    getters = ("get_tensor_model_parallel_group", "get_model_parallel_group", "tensor")  # the last is zcomm.Groups'
    name = next((name for name in getters if hasattr(wanted.mpu, name)), "")
    if not name:
        raise ValueError(
            f"mpu= is a {type(wanted.mpu).__name__} without get_model_parallel_group() and "
            "get_tensor_model_parallel_group(): give one that has either, or tensor_parallel={'tp_group': group}."
        )
    of: Callable[[], ProcessGroup | None] = getattr(wanted.mpu, name)
    return of()


def _group(wanted: Wanted) -> ProcessGroup | None:
    found = _given(wanted)
    return found if found is not None or wanted.size <= 1 else zcomm.consecutive_group(wanted.size)


def _is_several(wanted: Wanted) -> bool:
    found = _given(wanted)
    return wanted.size > 1 if found is None else zcomm.group_size(found) > 1


def _to_do(wanted: Wanted, cells: Sequence[zpartition.ModelParallelGroup], what: str) -> Wanted:
    """Return what is wanted, or nothing where it has been done.  Raises ValueError where it was done over other
    ranks."""
    done = next((_ranks(cell.group) for cell in cells if cell.size > 1), None)
    if done is None or not _is_several(wanted):
        return wanted
    given = _given(wanted)
    first = get_rank() // max(wanted.size, 1) * wanted.size
    asked = list(range(first, first + wanted.size)) if given is None else _ranks(given)
    if done != asked:
        raise ValueError(
            f"the model's {what} are split over ranks {done} already, and ranks {asked} are asked for: a model is "
            "split once. Leave the sizes out to use it as it is, or begin with a whole one."
        )
    log.warning("init_inference: the model's %s are split over ranks %s already: used as they are", what, done)
    return NOBODY


def _place(wanted: Wanted) -> tuple[int, int]:
    """(number of ranks, which of them this is); asks nobody."""
    given = _given(wanted)
    if given is not None:
        return zcomm.group_size(given), zcomm.group_rank(given)
    return wanted.size, get_rank() % wanted.size


def _ranks(group: ProcessGroup | None) -> list[int]:
    return list(range(get_world_size())) if group is None else dist.get_process_group_ranks(group)


def _planned_layers(module: nn.Module, sharing: Sharing) -> Split:
    """The plan, which fits the model as far as one rank can tell."""
    is_real = not any(param.is_meta for param in module.parameters())
    inputs = small_input(module, lambda: None, _device(module)) if is_real else None
    plan = written_plan(module, sharing)
    if plan is None and inputs is None:
        why = (
            "it has no dummy_inputs (the arguments of its forward by name)" if is_real else "it is on the meta device"
        )
        raise ValueError(
            f"how the layers of {type(module).__name__} are split is found out by running it with a small input, and "
            f"{why}. Name the layers: injection_policy={{Block: (names of the layers whose outputs are added to the "
            "residual stream,)}, or tensor_parallel={'partition_config': ...}."
        )
    proposal = plan if plan is not None else _inferred(module, inputs)
    proposal = attrs.evolve(proposal, grain=max(sharing.grain, proposal.grain))
    tensor.resolve(proposal, module, *_place(sharing.tensor))
    return Split(layers=sharing.tensor, plan=proposal, is_inferred=plan is None, inputs=inputs)


def written_plan(module: nn.Module, sharing: Sharing) -> TensorPlan | None:
    """Return what somebody has written: in the config, or in the model."""
    if isinstance(sharing.plan, TensorPlan):
        return sharing.plan
    if sharing.plan:
        return tensor.read_layer_specs(sharing.plan, module)
    if sharing.policy:
        return tensor.read_injection_policy(sharing.policy, module, _seen(module))
    own = model_tp_plan(module)
    return tensor.read_tp_plan(own, module) if own else None


def _inferred(module: nn.Module, inputs: Input | None) -> TensorPlan:
    args, kwargs = inputs or ((), {})
    return tensor.infer_plan(module, *args, kwargs=kwargs)


def _seen(module: nn.Module) -> TensorPlan | None:
    """Return what a run of the model tells of its layers; None where it cannot be run, or shows nothing."""
    given: Mapping[str, Any] = getattr(module, "dummy_inputs", None) or {}
    try:
        return tensor.infer_plan(module, kwargs=given) if given else None
    except ValueError:  # no pairs that it could see
        return None


def _refuse_experts(module: nn.Module, size: int, sharing: Sharing) -> None:
    """ValueError, with numbers, for experts that cannot be shared out over `size` ranks, or are others than said."""
    from zpartition import experts

    stacks = experts.divisible_experts(module, size)
    numbers = {path: int(getattr(stack, "num_experts", 0)) for path, stack in stacks.items()}
    for path, number in numbers.items():
        if sharing.expert_counts and number not in sharing.expert_counts:
            raise ValueError(
                f"moe_experts = {list(sharing.expert_counts)}, and {path} has {number} experts: leave moe_experts "
                "out, experts are found and counted."
            )


def _device(module: nn.Module) -> torch.device:
    return next((param.device for param in module.parameters()), torch.device("cpu"))
