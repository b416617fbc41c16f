"""Splits the module over the tensor ranks, where the config or a mesh asks for it and nobody has done it.

Which layer is split how comes from the config's `layer_specs`, from the model (`tp_plan`, as Transformers' models
have), or from the model's behaviour: inferred from one small input, and verified by running it whole and split.  That
input is a sample of the training data, or the `dummy_inputs` of the model.  Specs come first, and what they leave out
is split as the model suggests, unless the config says otherwise; both together are verified too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
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

__all__ = ["TRIED_NUMEL", "Input", "first_batch", "own_plan", "small_input", "split_tensors"]

log = logging.getLogger("zengine")

# Elements of a model up to which a plan that somebody wrote is tried, which takes two more copies and gradients.
# One that was inferred is always tried.
TRIED_NUMEL = 2**28

Input = tuple[tuple[Any, ...], Mapping[str, Any]]  # how forward is called


def split_tensors(
    module: nn.Module, plan: Plan, groups: zcomm.Groups, device: torch.device, sample: Callable[[], Any]
) -> None:
    """Split `module` in place over the tensor ranks; nothing is done where there is one, or it is split already.

    sample: a small batch, as forward gets it; None if there is none.  All ranks call.

    Raises:
        ValueError: what the plan in use has against the model, or there is no plan and no input to infer one from;
            before any message, unless running the split model is what tells.
        RanksDisagree: ranks have other models or configs.
    """
    if plan.parallel.degrees.tensor == 1 or zpartition.model_parallel_group_of(module).size > 1:
        return
    wanted, group = plan.parallel.tensor, groups.tensor()
    is_stage = zpartition.pipeline_stages_of(module).size > 1
    is_deferred = zpartition.is_deferred(module)  # then there is nothing to run, or to move
    given = None if is_stage or is_deferred else small_input(module, sample, device)
    if not is_deferred:
        module.to(device)
    proposal = _of_stage(module, wanted) if is_stage else _proposal(module, wanted, given)
    tensor.resolve(proposal, module, zcomm.group_size(group), zcomm.group_rank(group))  # errors before any message
    compare({"plan": plan_lines(plan)}, groups.world())
    compare({"parameters": parameter_lines(module)}, _same_layers(groups))
    if is_stage:
        _refuse_idle(proposal, wanted, groups)
    tensor.parallelize(module, _verified(proposal, module, wanted, group, given), group)


def first_batch(dataset: Any, collate_fn: Callable[[list[Any]], Any] | None, device: torch.device) -> Any:
    """One sample as a batch on `device`, the same on all ranks also if it is drawn; None for a stream, or no data."""
    if dataset is None or not is_indexed(dataset):
        return None
    collate = collate_fn or torch.utils.data.default_collate
    with preserve_generators():
        seed_generators(0)
        batch = collate([dataset[0]])
    return map_tensors(batch, lambda leaf: leaf.to(device))


def _proposal(module: nn.Module, wanted: TensorPlan, given: Input | None) -> tensor.TensorPlan:
    """Return what becomes of each layer, as far as this rank can tell by itself."""
    uncovered = tensor.Uncovered.REFUSE if wanted.is_strict else tensor.Uncovered.KEEP
    rules = tensor.read_layer_specs({"layer_specs": wanted.layer_specs}, module).rules
    if rules and wanted.completes and given is None and not own_plan(module):
        log.warning(
            "tensor_parallel.partition_config: layers that its specs leave out stay whole, for want of a sample of "
            "the training data to see how they could be split. Set use_default_specs to false if that is meant"
        )
    elif not rules or wanted.completes:
        own = own_plan(module)
        suggested = tensor.read_tp_plan(own, module) if own else _inferred(module, wanted, given)
        rules = (*rules, *suggested.rules)
    return tensor.TensorPlan(rules, uncovered, wanted.grain)


def _inferred(module: nn.Module, wanted: TensorPlan, given: Input | None) -> tensor.TensorPlan:
    if given is None and zpartition.is_deferred(module):
        raise ValueError(
            f"the {type(module).__name__} was built inside zero.Init and has no values yet, so it cannot be run to "
            "see how its layers are split: name them in tensor_parallel.partition_config.layer_specs, or build it "
            "plainly."
        )
    if given is None:
        raise ValueError(
            f"a plan for {type(module).__name__} is inferred from what the model does with a small input, and there "
            "is none: pass training_data= to initialize(), give the model dummy_inputs (the arguments of its forward "
            "by name), or name its layers in tensor_parallel.partition_config.layer_specs."
        )
    args, kwargs = given
    return tensor.infer_plan(module, *args, kwargs=kwargs, vocabulary=wanted.splits_vocabulary)


def _of_stage(module: nn.Module, wanted: TensorPlan) -> tensor.TensorPlan:
    """Return what the specs say of the layers that this rank has: a stage alone cannot be run to find out."""
    own = own_plan(module)
    if not wanted.layer_specs and not own:
        raise ValueError(
            "tensor_parallel of a PipelineModule: how its layers are split is not inferred, since no rank can run "
            "all of them. Name them in partition_config.layer_specs, by regular expressions over names of weights, "
            f"such as {next((name for name, _ in module.named_parameters()), '')!r}."
        )
    uncovered = tensor.Uncovered.REFUSE if wanted.is_strict else tensor.Uncovered.KEEP
    rules = tensor.read_layer_specs({"layer_specs": wanted.layer_specs}, module, is_part=True).rules
    suggested = tensor.read_tp_plan(own, module).rules if own and (wanted.completes or not rules) else ()
    return tensor.TensorPlan((*rules, *suggested), uncovered, wanted.grain)


def _refuse_idle(proposal: tensor.TensorPlan, wanted: TensorPlan, groups: zcomm.Groups) -> None:
    """ValueError for a pattern that fits no layer of any stage."""
    everywhere = zcomm.all_gather_object([rule.pattern for rule in proposal.rules], groups.pipeline())
    names = [name for stage in everywhere for name in stage]
    meant = [spec for spec in wanted.layer_specs if not spec["model_types"]]  # whatever the model is
    for pattern in (each for spec in meant for each in spec["patterns"]):
        if not any(tensor.Rule(f"re:{pattern}", tensor.Replicated()).matches(name) for name in names):
            raise ValueError(
                f"tensor_parallel.partition_config.layer_specs: pattern {pattern!r} fits no weight of any stage."
            )


def _same_layers(groups: zcomm.Groups) -> ProcessGroup | None:
    """Ranks that begin with the same modules: all but those of other stages."""
    return groups.group(groups.ranks("replicate", "shard", "sequence", "tensor"))


def _verified(
    proposal: tensor.TensorPlan,
    module: nn.Module,
    wanted: TensorPlan,
    group: ProcessGroup | None,
    given: Input | None,
) -> tensor.TensorPlan:
    """The proposal, or what has passed the test where it was inferred; what somebody wrote is tested if it can be."""
    args, kwargs = given or ((), {})
    if not wanted.layer_specs and not own_plan(module):
        fitted = tensor.infer_verified_plan(module, group, *args, kwargs=kwargs, vocabulary=wanted.splits_vocabulary)
        return attrs.evolve(fitted, uncovered=proposal.uncovered, grain=proposal.grain)
    if given is not None and sum(param.numel() for param in module.parameters()) <= TRIED_NUMEL:
        tensor.verify(module, proposal, group, *args, kwargs=kwargs)
    return proposal


def own_plan(module: nn.Module) -> Mapping[str, str]:
    """Return what the model says about its layers, unless that is about its head alone."""
    own: Mapping[str, str] = getattr(module, "tp_plan", None) or getattr(module, "_tp_plan", None) or {}
    return own if any("row" in style and "embedding" not in style for style in own.values()) else {}


def small_input(module: nn.Module, sample: Callable[[], Any], device: torch.device) -> Input | None:
    """A small input, as a loop would give it to the model; None if there is none."""
    batch = getattr(module, "dummy_inputs", None)
    batch = sample() if batch is None else map_tensors(dict(batch), lambda leaf: leaf.to(device))
    if batch is None:
        return None
    given: Input = ((tuple(batch) if isinstance(batch, tuple | list) else (batch,)), {})
    given = ((), dict(batch)) if isinstance(batch, Mapping) else given
    return given if _runs(module.to(device), given) else None


def _runs(module: nn.Module, given: Input) -> bool:
    """Return whether the model takes a batch as the data has it; loops may do something in between."""
    modes = {child: child.training for child in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(*given[0], **given[1])
    except Exception as error:  # the model's own, of any kind
        log.warning(
            "tensor_parallel: %s does not take a sample of the training data as it is (%s: %s), so there is nothing "
            "to try a plan with",
            type(module).__name__,
            type(error).__name__,
            error,
        )
        return False
    finally:
        for child, is_training in modes.items():
            child.training = is_training
    return True
