"""How many ranks do what together, from the config and what the caller has laid out: the part of `resolve` that is
about splitting the model.

The degrees multiply to the ranks of the engine.  Whatever does not divide is told here, with the equation, before a
process group exists; what comes out is a value (`zcomm.Degrees`, resolved), from which groups follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import attrs

from zcomm import Degrees
from zengine.config.errors import NOWHERE, Problem
from zengine.config.violating import at

if TYPE_CHECKING:
    from zengine.config.load import Config
    from zengine.config.plan import Facts
    from zengine.config.schema import Settings

__all__ = [
    "MODEL_AXES",
    "TENSOR_KEYS",
    "ParallelPlan",
    "TensorPlan",
    "parallel_notices",
    "parallel_plan",
    "parallel_rows",
]

MODEL_AXES = ("pipeline", "sequence", "tensor")  # ranks along these work on the same samples

# Keys that set each degree.  0 is as good as 1: not asked for.
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


TENSOR_KEYS = tuple(_KEYS["tensor"])  # that ask for tensor ranks


@attrs.frozen(kw_only=True)
class TensorPlan:
    """How layers are split over tensor ranks."""

    layer_specs: tuple[Mapping[str, Any], ...] = ()  # DeepSpeed's, which come first
    completes: bool = True  # layers that none names are split as the model suggests
    is_strict: bool = False  # a linear layer that nothing names is an error
    splits_vocabulary: bool = False  # embeddings and output layers of an inferred plan, too
    grain: int = 1  # columns without heads stay together by this many


@attrs.frozen(kw_only=True)
class ParallelPlan:
    """Who does what; `zcomm.axes` says which ranks these are.  Invariant: `degrees` has no -1."""

    degrees: Degrees = attrs.field(factory=lambda: Degrees(shard=1))
    tensor: TensorPlan = attrs.field(factory=TensorPlan)
    expert_layers: str = ""  # regular expression of the paths whose experts are shared out

    @property
    def data_ranks(self) -> int:
        """Ranks that see different samples: the replicas of the batch equation."""
        return self.degrees.replicate * self.degrees.shard

    @property
    def gradient_ranks(self) -> int:
        """Ranks that sum gradients, over which ZeRO shards."""
        return self.data_ranks * self.degrees.sequence

    @property
    def cells(self) -> int:
        """Ranks that hold different parts of one copy of the model, ZeRO aside."""
        return self.degrees.pipeline * self.degrees.tensor


def parallel_plan(config: Config, facts: Facts) -> ParallelPlan | list[Problem]:
    """The degrees, or all that is wrong with them."""
    problems: list[Problem] = _patterns_compile(config)
    sizes = {axis: _size(config, axis, facts, problems) for axis in _KEYS}
    if problems:
        return problems
    total = facts.replicas * math.prod(facts.axes.get(axis, 1) for axis in MODEL_AXES)
    shared = math.prod(sizes[axis] for axis in MODEL_AXES)
    if total % shared:
        return [_no_quotient(config, sizes, total)]
    data = {axis: facts.axes[axis] for axis in ("replicate", "shard") if axis in facts.axes}
    try:
        degrees = Degrees(**sizes, **data).resolved(total)
        layers = config.settings.expert_parallel.moe_layer_pattern or ""
        return ParallelPlan(degrees=degrees, tensor=_tensor(config.settings), expert_layers=layers)
    except ValueError as error:  # experts, or a mesh whose axes do not make its ranks
        return [_problem(config, "expert", sizes["expert"], str(error).rstrip("."), "")]


def parallel_rows(plan: ParallelPlan) -> Iterator[tuple[str, Any]]:
    """Key and value for people, of the keys that are honoured."""
    yield "sequence_parallel_size", plan.degrees.sequence
    yield "tensor_parallel.autotp_size", plan.degrees.tensor
    yield "tensor_parallel.tp.tp_size", plan.degrees.tensor
    yield "tensor_parallel.tp.tp_grain_size", plan.tensor.grain
    yield "tensor_parallel.vocab_parallel_lm_head", plan.tensor.splits_vocabulary
    home = "tensor_parallel.partition_config"
    yield f"{home}.use_default_specs", plan.tensor.completes
    yield f"{home}.strict_mode", plan.tensor.is_strict
    for index, spec in enumerate(plan.tensor.layer_specs):
        yield from ((f"{home}.layer_specs[{index}].{name}", _shown(value)) for name, value in spec.items())
    yield "expert_parallel.enabled", plan.degrees.expert > 1
    yield "expert_parallel.autoep_size", plan.degrees.expert
    yield "expert_parallel.moe_layer_pattern", plan.expert_layers


def parallel_notices(config: Config, plan: ParallelPlan) -> list[str]:
    """Keys that say how to split what is not split."""
    home = "tensor_parallel."
    tuned = [key for key in config.given if key.startswith(home) and key not in _KEYS["tensor"]]
    if not tuned or plan.degrees.tensor > 1:
        return []
    verb = "has" if len(tuned) == 1 else "have"
    return [f"{config.origin(tuned[0])}: {', '.join(tuned)} {verb} no effect here: every rank has whole layers"]


def _shown(value: Any) -> Any:
    return (list(value) or "(none)") if isinstance(value, tuple) else value


def _tensor(settings: Settings) -> TensorPlan:
    section = settings.tensor_parallel
    return TensorPlan(
        layer_specs=tuple(attrs.asdict(spec) for spec in section.partition_config.layer_specs),
        completes=section.partition_config.use_default_specs,
        is_strict=section.partition_config.strict_mode,
        splits_vocabulary=section.vocab_parallel_lm_head,
        grain=section.tp.tp_grain_size,
    )


def _patterns_compile(config: Config) -> list[Problem]:
    key, pattern = "expert_parallel.moe_layer_pattern", config.settings.expert_parallel.moe_layer_pattern
    try:
        re.compile(pattern or "")
    except re.error as error:
        place = config.given.get(key, NOWHERE)
        reason = f"it is no regular expression ({error})"
        return [
            Problem(place=place, key=key, given=pattern, reason=reason, suggestion="Correct it, or leave it out.")
        ]
    return []


def _size(config: Config, axis: str, facts: Facts, problems: list[Problem]) -> int:
    """The degree of one axis; 1 and a problem where it is asked for in two ways."""
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
        reason = f"{facts.laid_out_by} has {laid_out} {axis} rank{'s' * (laid_out != 1)} for each copy"
        hint = f"Make it {laid_out}, or leave the key out: {facts.laid_out_by} decides."
        problems.append(_problem(config, axis, size, reason, hint))
    return laid_out


def _no_quotient(config: Config, sizes: Mapping[str, int], total: int) -> Problem:
    """The product does not divide the ranks; at the key of the largest degree."""
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
    """At the first of the keys of `axis` that was written."""
    key = next((key for key in _KEYS[axis] if key in config.given), next(iter(_KEYS[axis])))
    place = config.given.get(key, NOWHERE)
    return Problem(place=place, key=key, given=given, reason=reason, suggestion=suggestion)
