"""Degrees of parallelism, from the config and from the caller's mesh or model.

The degrees multiply to the number of the engine's ranks.  Degrees that do not divide it are reported with the
equation before a process group exists.  The result is a resolved `zcomm.Degrees`, which determines the groups.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs

from zcomm import Degrees
from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.parallel import (
    ActivationCheckpointing,
    ExpertParallel,
    PartitionConfig,
    Pipeline,
    TensorParallel,
    TensorRanks,
)
from zengine.config.keys.root import Settings
from zengine.config.plan.facts import Facts
from zengine.config.plan.replica_groups import replica_groups
from zengine.config.plan.rows import PlanRow, planned, rows
from zengine.config.reading.load import Config, at

__all__ = [
    "MODEL_AXES",
    "TENSOR_KEYS",
    "ActivationCheckpointing",
    "ParallelPlan",
    "TensorPlan",
    "activation_notices",
    "parallel_notices",
    "parallel_plan",
    "parallel_rows",
]

MODEL_AXES = ("pipeline", "sequence", "tensor")  # ranks along these process the same samples

# Keys that set each degree; 0 and 1 mean "not requested".
_KEYS: Mapping[str, Mapping[str, Callable[[Settings], int]]] = {
    "tensor": {
        "tensor_parallel.autotp_size": lambda s: s.tensor_parallel.autotp_size,
        "tensor_parallel.tp.tp_size": lambda s: s.tensor_parallel.tp.tp_size,
    },
    "sequence": {"sequence_parallel_size": lambda s: s.sequence_parallel_size},
    "pipeline": {"pipeline.stages": lambda s: s.pipeline.stages},
    "expert": {
        "expert_parallel.autoep_size": lambda s: s.expert_parallel.autoep_size if s.expert_parallel.enabled else 0
    },
}


TENSOR_KEYS = tuple(_KEYS["tensor"])  # keys that set the tensor-parallel degree


@attrs.frozen(kw_only=True)
class TensorPlan:
    """Tensor parallelism: the split of layers."""

    layer_specs: tuple[Mapping[str, Any], ...] = ()  # DeepSpeed's; they take precedence
    completes: bool = True  # layers without a spec are split by the model's own or inferred plan
    is_strict: bool = False  # a linear layer that neither covers is an error
    splits_vocabulary: bool = False  # an inferred plan splits embeddings and the output layer as well
    grain: int = 1  # granularity of the split of layers without heads, in columns


@attrs.frozen(kw_only=True)
class ParallelPlan:
    """Degrees of parallelism; `zcomm.groups.axes` assigns the ranks.  Invariant: `degrees` contains no -1."""

    degrees: Degrees = attrs.field(factory=lambda: Degrees(shard=1))
    tensor: TensorPlan = attrs.field(factory=TensorPlan)
    independent_replicas: bool = False  # no gradients are summed along `replicate`: diloco
    expert_layers: str = ""  # regular expression for the paths of the layers whose experts are distributed

    @property
    def data_ranks(self) -> int:
        """Ranks that process different samples: the replicas of the batch equation."""
        return self.degrees.replicate * self.degrees.shard

    @property
    def sample_ranks(self) -> int:
        """Ranks that process different parts of samples."""
        return self.data_ranks * self.degrees.sequence

    @property
    def gradient_ranks(self) -> int:
        """Ranks that sum gradients, and over which ZeRO shards."""
        return self.sample_ranks // (self.degrees.replicate if self.independent_replicas else 1)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold different parts of one copy of the model, without ZeRO."""
        return self.degrees.pipeline * self.degrees.tensor


def parallel_plan(config: Config, facts: Facts) -> ParallelPlan | list[Problem]:
    """Resolve the degrees; return all problems if they are invalid."""
    problems: list[Problem] = _check_patterns(config)
    sizes = {axis: _size(config, axis, facts, problems) for axis in _KEYS}
    if problems:
        return problems
    total = facts.replicas * math.prod(facts.axes.get(axis, 1) for axis in MODEL_AXES)
    shared = math.prod(sizes[axis] for axis in MODEL_AXES)
    if total % shared:
        return [_no_quotient(config, sizes, total)]
    data = {axis: facts.axes[axis] for axis in ("replicate", "shard") if axis in facts.axes}
    is_apart = config.settings.diloco.sync_every > 0
    if is_apart:
        groups = replica_groups(config, facts, total // shared, sizes["sequence"])
        if isinstance(groups, Problem):
            return [groups]
        data["replicate"] = groups
    try:
        degrees = Degrees(**sizes, **data).resolved(total)
        layers = config.settings.expert_parallel.moe_layer_pattern or ""
        plan = ParallelPlan(
            degrees=degrees,
            tensor=_tensor(config.settings),
            expert_layers=layers,
            independent_replicas=is_apart,
        )
        return _check_experts(config, plan)
    except ValueError as error:  # the expert degree, or a mesh whose axes do not multiply to its ranks
        return [_problem(config, "expert", sizes["expert"], str(error).rstrip("."), "")]


def _check_experts(config: Config, plan: ParallelPlan) -> ParallelPlan | list[Problem]:
    """Return the plan, or the problem of experts that would be sharded over independent replicas."""
    experts, ranks = plan.degrees.expert, plan.gradient_ranks
    if ranks % experts == 0:
        return plan
    reason = f"a replica group of diloco has {ranks} ranks that sum gradients, among which experts are sharded"
    return [_problem(config, "expert", experts, reason, "Choose a divisor of it, or fewer groups.")]


def parallel_rows(plan: ParallelPlan, pipeline: Pipeline, activations: ActivationCheckpointing) -> Iterator[PlanRow]:
    """Yield the rows of the sections that split the model."""
    degrees, config = plan.degrees, "tensor_parallel.partition_config."
    yield from rows("tensor_parallel.", plan.tensor, TensorParallel, autotp_size=degrees.tensor)
    yield from rows("tensor_parallel.tp.", plan.tensor, TensorRanks, tp_size=degrees.tensor)
    yield from rows(config, plan.tensor, PartitionConfig)
    for index, spec in enumerate(plan.tensor.layer_specs):
        yield from ((f"{config}layer_specs[{index}].{name}", _shown(value)) for name, value in spec.items())
    yield "expert_parallel.enabled", degrees.expert > 1
    yield from rows("expert_parallel.", plan, ExpertParallel, skip=("enabled",))
    yield from rows("pipeline.", pipeline, Pipeline)
    yield from rows("activation_checkpointing.", activations, ActivationCheckpointing)


def _shown(value: Any) -> Any:
    return (list(value) or "(none)") if isinstance(value, tuple) else value


def parallel_notices(config: Config, plan: ParallelPlan) -> list[str]:
    """Return a notice of tensor-parallel keys without effect because layers are not split."""
    home, pipeline = "tensor_parallel.", config.settings.pipeline
    tuned = [key for key in config.given if key.startswith(home) and key not in _KEYS["tensor"]]
    parts = ("pipe_partitioned", "grad_partitioned")
    tuned += [f"pipeline.{key}" for key in parts if getattr(pipeline, key)]
    if not tuned or plan.degrees.tensor > 1:
        return []
    verb = "has" if len(tuned) == 1 else "have"
    return [f"{config.origin(tuned[0])}: {', '.join(tuned)} {verb} no effect here: layers are not split"]


def _tensor(settings: Settings) -> TensorPlan:
    section = settings.tensor_parallel
    specs = tuple(attrs.asdict(spec) for spec in section.partition_config.layer_specs)
    own, sizes = planned(section, TensorPlan), planned(section.tp, TensorPlan)
    return TensorPlan(**own, **sizes, **planned(section.partition_config, TensorPlan, layer_specs=specs))


def _check_patterns(config: Config) -> list[Problem]:
    key, pattern = "expert_parallel.moe_layer_pattern", config.settings.expert_parallel.moe_layer_pattern
    try:
        re.compile(pattern or "")
    except re.error as error:
        place = config.given.get(key, NOWHERE)
        reason = f"not a regular expression ({error})"
        return [
            Problem(place=place, key=key, given=pattern, reason=reason, suggestion="Correct it, or leave it out.")
        ]
    return []


def _size(config: Config, axis: str, facts: Facts, problems: list[Problem]) -> int:
    """Return the degree of one axis; 1 and a problem if two keys set different degrees."""
    asked = {key: read(config.settings) for key, read in _KEYS[axis].items() if key in config.given}
    asked = {key: size for key, size in asked.items() if size > 0}
    laid_out = facts.axes.get(axis)
    if len(set(asked.values())) > 1:
        both = " and ".join(f"{at(config, key)} = {size}" for key, size in asked.items())
        problems.append(_problem(config, axis, max(asked.values()), f"{both} differ", "Keep one of them."))
        return 1
    size = next(iter(asked.values()), 1)
    if laid_out is None:
        return size
    if asked and size != laid_out:
        reason = f"{facts.axes_source} has {laid_out} {axis} rank{'s' * (laid_out != 1)} for each copy"
        hint = f"Make it {laid_out}, or leave the key out: {facts.axes_source} decides."
        problems.append(_problem(config, axis, size, reason, hint))
    return laid_out


def _no_quotient(config: Config, sizes: Mapping[str, int], total: int) -> Problem:
    """Return the problem of a product that does not divide the ranks, at the key of the largest degree."""
    axis = max(MODEL_AXES, key=lambda each: sizes[each])
    others = math.prod(sizes[each] for each in MODEL_AXES if each != axis)
    equation = " x ".join(f"{each} {sizes[each]}" for each in MODEL_AXES)
    fitting = [n for n in range(1, total + 1) if total % (n * others) == 0]
    hint = f"Choose one of {', '.join(map(str, fitting))}" if fitting else "Make the degrees smaller"
    return _problem(
        config,
        axis,
        sizes[axis],
        f"one copy of the model takes {equation} = {others * sizes[axis]} ranks, which does not divide the {total} "
        f"rank{'s' * (total != 1)} of this run",
        f"{hint}, or start a multiple of {others * sizes[axis]} ranks.",
    )


def _problem(config: Config, axis: str, given: int, reason: str, suggestion: str) -> Problem:
    """Return a problem at the first given key of `axis`."""
    key = next((key for key in _KEYS[axis] if key in config.given), next(iter(_KEYS[axis])))
    place = config.given.get(key, NOWHERE)
    return Problem(place=place, key=key, given=given, reason=reason, suggestion=suggestion)


def activation_notices(config: Config, parallel: ParallelPlan) -> list[str]:
    """Return notices of activation_checkpointing keys without effect."""
    section, found, home = config.settings.activation_checkpointing, [], "activation_checkpointing"
    if section.partition_activations and parallel.degrees.tensor == 1:
        found.append(
            f"{at(config, f'{home}.partition_activations')} has no effect here: the tensor-parallel degree is 1"
        )
    if section.number_checkpoints and not section.contiguous_memory_optimization:
        found.append(
            f"{at(config, f'{home}.number_checkpoints')} has no effect here: contiguous_memory_optimization is off"
        )
    return found
