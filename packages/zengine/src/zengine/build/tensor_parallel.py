"""Tensor parallelism: splits a module over the tensor ranks, if the config or a mesh asks for it.

The split of each layer comes from the config's `layer_specs`, from the model (`tp_plan`, as Transformers' models
have), or from the model's behaviour: inferred from one small input, and verified by running the model whole and
split.  The input is a sample of the training data, or the model's `dummy_inputs`.  Without an input the plan follows
the names of the layers, and each block verifies itself when the first batch comes.  Specs come first; layers without
one follow the model's plan, the inferred one or names, unless the config says otherwise.  The combined plan is
verified too.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn
from torch.distributed import ProcessGroup

import zcomm
import zpartition
from zengine.build.agreement import compare, parameter_lines, plan_lines
from zengine.data.loaders.factory import is_indexed
from zengine.data.loaders.fetch import preserve_generators, seed_generators
from zengine.data.tree import map_tensors
from zpartition import tensor

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.config.plan.parallel import TensorPlan

__all__ = ["VERIFIED_NUMEL", "Input", "first_batch", "small_input", "split_tensors"]

log = logging.getLogger("zengine")

# Largest model whose given plan is verified, which takes two more copies and gradients.  Inferred plans always are.
VERIFIED_NUMEL = 2**28

Input = tuple[tuple[Any, ...], Mapping[str, Any]]  # arguments of forward


class Origin(enum.Enum):
    """Origin of the split of the layers that the config does not name."""

    WRITTEN = "in the config or the model"
    INFERRED = "one run"
    NAMES = "names of layers"


@attrs.frozen
class Proposal:
    """A plan that is not verified yet."""

    plan: tensor.TensorPlan
    origin: Origin = Origin.WRITTEN
    has_specs: bool = False  # some of its rules are those of the config


def split_tensors(
    module: nn.Module, plan: Plan, groups: zcomm.Groups, device: torch.device, sample: Callable[[], Any]
) -> tensor.PendingVerification:
    """Split `module` in place over the tensor ranks, if there are several and it is not split yet.  All ranks call.

    sample: returns a small batch, as forward gets it; None if there is none.
    Returns the blocks that verify themselves at their first call.

    Raises:
        ValueError: the plan does not fit the model, or there is none, no input to infer one from, and no layer with a
            known name; before any message, unless the verification finds it.
        RanksDisagree: ranks have different models or configs.
    """
    if plan.parallel.degrees.tensor == 1 or zpartition.model_parallel_group_of(module).size > 1:
        return tensor.PendingVerification(())
    wanted, group = plan.parallel.tensor, groups.tensor()
    is_stage = zpartition.pipeline_stages_of(module).size > 1
    is_deferred = zpartition.is_deferred(module)  # has no values: cannot be run or moved
    given = None if is_stage or is_deferred else small_input(module, sample, device)
    if not is_deferred:
        module.to(device)
    num_ranks, rank = zcomm.group_size(group), zcomm.group_rank(group)
    proposal = _propose_for_stage(module, wanted) if is_stage else _propose(module, wanted, given, num_ranks)
    proposal = attrs.evolve(proposal, plan=_without_experts(proposal.plan, module, plan))
    tensor.resolve(proposal.plan, module, num_ranks, rank)  # errors before any message
    compare({"plan": plan_lines(plan)}, groups.world())
    compare({"parameters": parameter_lines(module)}, _same_layers(groups))
    if is_stage:
        _check_patterns(proposal.plan, wanted, groups)
    verified = _without_experts(_verify(proposal, module, wanted, group, given), module, plan)
    if proposal.origin is Origin.NAMES:
        pending = tensor.verify_on_first_call(module, verified, group)
    else:
        pending = tensor.PendingVerification(())
    tensor.parallelize(module, verified, group)
    return pending


def _without_experts(proposed: tensor.TensorPlan, module: nn.Module, plan: Plan) -> tensor.TensorPlan:
    """Return the plan without lists of experts that are about to be distributed: each is whole on one rank."""
    if plan.parallel.degrees.expert == 1:
        return proposed
    from zpartition import experts

    stacks = experts.find_experts(module, plan.parallel.expert_layers)
    lists = [path for path, stack in stacks.items() if isinstance(stack, nn.ModuleList)]
    whole = [tensor.Rule(f"{path}.**", tensor.Replicated()) for path in lists]
    return attrs.evolve(proposed, rules=(*(rule for rule in whole if rule not in proposed.rules), *proposed.rules))


def first_batch(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, device: torch.device) -> Any:
    """Return one sample as a batch on `device`, equal on all ranks even if random; None for streams or no data."""
    if dataset is None or not is_indexed(dataset):
        return None
    collate = collate_fn or torch.utils.data.default_collate
    with preserve_generators():
        seed_generators(0)
        batch = collate([dataset[0]])
    return map_tensors(batch, lambda leaf: leaf.to(device))


def _propose(module: nn.Module, wanted: TensorPlan, given: Input | None, num_ranks: int) -> Proposal:
    """Return the plan that this rank can make without communication."""
    uncovered = tensor.Uncovered.REFUSE if wanted.is_strict else tensor.Uncovered.KEEP
    rules = tensor.read_layer_specs({"layer_specs": wanted.layer_specs}, module).rules
    origin = Origin.WRITTEN
    if not rules or wanted.completes:
        suggested, origin = _suggest(module, wanted, given, num_ranks, has_specs=bool(rules))
        rules = (*rules, *suggested)
    plan = tensor.TensorPlan(rules, uncovered, wanted.grain)
    return Proposal(plan, origin, has_specs=bool(wanted.layer_specs))


def _suggest(
    module: nn.Module, wanted: TensorPlan, given: Input | None, num_ranks: int, *, has_specs: bool
) -> tuple[Sequence[tensor.Rule], Origin]:
    """Return the split of layers that the config does not name."""
    if own := tensor.find_tp_plan(module):
        try:
            return tensor.read_tp_plan(own, module).rules, Origin.WRITTEN
        except ValueError as error:
            if given is None:
                raise
            log.warning("tensor_parallel: the model's plan is not used, one is inferred instead. %s", error)
    if given is not None:
        args, kwargs = given
        inferred = tensor.infer_plan(module, *args, kwargs=kwargs, vocabulary=wanted.splits_vocabulary)
        return inferred.rules, Origin.INFERRED
    try:
        named = tensor.plan_by_names(module, num_ranks, vocabulary=wanted.splits_vocabulary)
    except ValueError as error:
        if has_specs:
            return (), Origin.WRITTEN
        raise ValueError(_no_plan_message(module, error)) from None
    log.warning(
        "tensor_parallel: there is no sample of the training data to infer a plan from, so layers of %s are split by "
        "their names: %s. Each block is verified when it is called first",
        type(module).__name__,
        ", ".join(rule.pattern for rule in named.rules),
    )
    return named.rules, Origin.NAMES


def _no_plan_message(module: nn.Module, error: ValueError) -> str:
    cause = (
        "was built inside zero.Init and has no values yet, so it cannot be run"
        if zpartition.is_deferred(module)
        else "cannot be run, since there is no small input"
    )
    return (
        f"the tensor-parallel plan of {type(module).__name__} cannot be inferred: it {cause}; and {error} Pass "
        "training_data= to initialize(), give the model dummy_inputs (the arguments of its forward by name), or name "
        "its layers in tensor_parallel.partition_config.layer_specs."
    )


def _propose_for_stage(module: nn.Module, wanted: TensorPlan) -> Proposal:
    """Return the plan of this rank's layers by specs or the model's plan; one stage cannot be run to infer it."""
    own = tensor.find_tp_plan(module)
    if not wanted.layer_specs and not own:
        raise ValueError(
            "tensor_parallel of a PipelineModule: the split of its layers cannot be inferred, since no rank can run "
            "all of them. Name them in partition_config.layer_specs, by regular expressions over names of weights, "
            f"such as {next((name for name, _ in module.named_parameters()), '')!r}."
        )
    uncovered = tensor.Uncovered.REFUSE if wanted.is_strict else tensor.Uncovered.KEEP
    rules = tensor.read_layer_specs({"layer_specs": wanted.layer_specs}, module, is_part=True).rules
    suggested = tensor.read_tp_plan(own, module).rules if own and (wanted.completes or not rules) else ()
    return Proposal(tensor.TensorPlan((*rules, *suggested), uncovered, wanted.grain))


def _check_patterns(proposal: tensor.TensorPlan, wanted: TensorPlan, groups: zcomm.Groups) -> None:
    """Raise ValueError for a pattern that matches no layer of any stage."""
    everywhere = zcomm.all_gather_object([rule.pattern for rule in proposal.rules], groups.pipeline())
    names = [name for stage in everywhere for name in stage]
    general = [spec for spec in wanted.layer_specs if not spec["model_types"]]  # for any model
    for pattern in (each for spec in general for each in spec["patterns"]):
        if not any(tensor.Rule(f"re:{pattern}", tensor.Replicated()).matches(name) for name in names):
            raise ValueError(
                f"tensor_parallel.partition_config.layer_specs: pattern {pattern!r} matches no weight of any stage."
            )


def _same_layers(groups: zcomm.Groups) -> ProcessGroup | None:
    """Return the group of ranks with the same modules: those of one stage."""
    return groups.group(groups.ranks("replicate", "shard", "sequence", "tensor"))


def _verify(
    proposal: Proposal, module: nn.Module, wanted: TensorPlan, group: ProcessGroup | None, given: Input | None
) -> tensor.TensorPlan:
    """Return the verified plan: an inferred one is corrected by verification, a given one is verified if possible."""
    plan, (args, kwargs) = proposal.plan, given or ((), {})
    if proposal.origin is Origin.INFERRED and not proposal.has_specs:
        verified = tensor.infer_verified_plan(
            module, group, *args, kwargs=kwargs, vocabulary=wanted.splits_vocabulary
        )
        return attrs.evolve(verified, uncovered=plan.uncovered, grain=plan.grain)
    if given is not None and sum(param.numel() for param in module.parameters()) <= VERIFIED_NUMEL:
        tensor.verify(module, plan, group, *args, kwargs=kwargs)
    return plan


def small_input(module: nn.Module, sample: Callable[[], Any], device: torch.device) -> Input | None:
    """Return a small input for the model's forward; None if there is none."""
    batch = getattr(module, "dummy_inputs", None)
    batch = sample() if batch is None else map_tensors(dict(batch), lambda leaf: leaf.to(device))
    if batch is None:
        return None
    given: Input = ((tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {})
    given = ((), dict(batch)) if isinstance(batch, Mapping) else given
    return given if _accepts_input(module.to(device), given) else None


def _accepts_input(module: nn.Module, given: Input) -> bool:
    """Return True if the model accepts a batch of the data directly; training loops may transform it first."""
    modes = {child: child.training for child in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(*given[0], **given[1])
    except Exception as error:  # the model's own, of any kind
        log.warning(
            "tensor_parallel: %s does not accept a sample of the training data as it is (%s: %s), so no plan can be "
            "verified with it",
            type(module).__name__,
            type(error).__name__,
            error,
        )
        return False
    finally:
        for child, is_training in modes.items():
            child.training = is_training
    return True
