"""Rules of the enabled data sections: required keys, and keys that must agree.

A section is enabled if every switch above it is on: `data_efficiency.enabled`, `data_sampling.enabled`, its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.data import (
    CurriculumLearning,
    CurriculumMetric,
    DataCurriculum,
    DynamicBatchingSection,
    LtdSchedule,
    RandomLtdSection,
)
from zengine.config.reading.load import Config
from zengine.data.order.packing import Packing, PickingOrder
from zengine.data.order.schedules import Custom, FixedDiscrete, FixedRoot, Schedule

if TYPE_CHECKING:
    from zengine.config.plan.parallel import ParallelPlan  # imports torch

SEQLEN = "curriculum_learning"
METRICS = "data_efficiency.data_sampling.curriculum_learning"
PACKING = "data_efficiency.data_sampling.dynamic_batching"
LTD = "data_efficiency.data_routing.random_ltd"
MEASURED = "seqlen"  # the metric that needs no files: it is measured at start

_NEEDED: dict[str, tuple[str, ...]] = {
    "fixed_linear": ("total_curriculum_step",),
    "fixed_root": ("total_curriculum_step",),
    "fixed_discrete": ("difficulty",),
    "custom": (),
}
_USED = {
    "fixed_linear": {"total_curriculum_step", "difficulty_step"},
    "fixed_root": {"total_curriculum_step", "difficulty_step", "root_degree"},
    "fixed_discrete": {"difficulty", "max_step"},
}


# -- enabled sections ----------------------------------------------------------------------------


def curriculum(config: Config) -> tuple[CurriculumLearning, ...]:
    """Return the legacy section if it is enabled, else ()."""
    section = config.settings.curriculum_learning
    return (section,) if section.enabled else ()


def sample_curriculum(config: Config) -> tuple[DataCurriculum, ...]:
    """Return the curriculum over samples if it is enabled, else ()."""
    efficiency = config.settings.data_efficiency
    section = efficiency.data_sampling.curriculum_learning
    return (section,) if efficiency.enabled and efficiency.data_sampling.enabled and section.enabled else ()


def dynamic_batching(config: Config) -> tuple[DynamicBatchingSection, ...]:
    """Return dynamic batching if it is enabled, else ()."""
    efficiency = config.settings.data_efficiency
    section = efficiency.data_sampling.dynamic_batching
    return (section,) if efficiency.enabled and efficiency.data_sampling.enabled and section.enabled else ()


def random_ltd(config: Config) -> tuple[RandomLtdSection, ...]:
    """Return random-LTD if it is enabled, else ()."""
    efficiency = config.settings.data_efficiency
    section = efficiency.data_routing.random_ltd
    return (section,) if efficiency.enabled and efficiency.data_routing.enabled and section.enabled else ()


# -- values, which validate themselves -------------------------------------------------------------


def schedule_of(section: CurriculumLearning | CurriculumMetric) -> Schedule:
    """Build the schedule of a section.

    Raises:
        ValueError: a key is missing or contradicts the others.
    """
    kind, details = section.schedule_type, section.schedule_config
    if not kind:
        raise ValueError("schedule_type is missing: it is fixed_linear, fixed_root, fixed_discrete or custom")
    missing = [f"schedule_config.{name}" for name in _NEEDED[kind] if not getattr(details, name)]
    missing += ["max_difficulty"] * (not section.max_difficulty)
    if missing:
        raise ValueError(f'schedule_type "{kind}" needs {" and ".join(missing)}')
    low, high = section.min_difficulty, section.max_difficulty
    if kind == "custom":
        return Custom(low=low, high=high)
    if kind == "fixed_discrete":
        outside = [value for value in details.difficulty if not low <= value <= high]
        if outside:
            raise ValueError(f"difficulties {outside} are not between min_difficulty {low} and max_difficulty {high}")
        return FixedDiscrete(difficulties=details.difficulty, until=details.max_step)
    return FixedRoot(
        low=low,
        high=high,
        steps=details.total_curriculum_step,
        multiple=details.difficulty_step,
        degree=details.root_degree if kind == "fixed_root" else 1.0,
    )


def packing_of(section: DynamicBatchingSection) -> Packing:
    """Build the packing of dynamic batching.  Raises ValueError for invalid limits of a micro-batch."""
    if not section.max_tokens:
        raise ValueError("max_tokens is missing")
    return Packing(
        max_tokens=section.max_tokens,
        min_batch_size=section.min_batch_size,
        max_batch_size=section.max_batch_size,
        picking=PickingOrder(section.sequence_picking_order),
    )


def ltd_schedule_of(section: LtdSchedule) -> Schedule:
    """Build the token schedule of random-LTD.  Raises ValueError for invalid keys."""
    details = section.schedule_config
    if not section.max_value or not details.require_steps:
        raise ValueError("max_value and schedule_config.require_steps are needed, each at least 1")
    return FixedRoot(
        low=section.min_value, high=section.max_value, steps=details.require_steps, multiple=details.seq_per_step
    )


# -- the rules -----------------------------------------------------------------------------------


def data_violations(config: Config) -> list[Problem]:
    """Return a problem for every rule that the data sections break."""
    return [*_check_seqlen(config), *_check_samples(config), *_check_batches(config), *_check_layers(config)]


def _problem(config: Config, key: str, reason: str, suggestion: str) -> Problem:
    inner = [place for name, place in config.given.items() if name.startswith(f"{key}.")]
    place = config.given.get(key, inner[0] if inner else NOWHERE)
    return Problem(place=place, key=key, reason=reason, suggestion=suggestion)


def _rejection(make: Callable[[Any], object], section: Any) -> str:
    """Return the reason why `make` rejects a section; "" if it accepts it."""
    try:
        make(section)
    except ValueError as error:
        return str(error)
    return ""


def _check_seqlen(config: Config) -> Iterator[Problem]:
    for section in curriculum(config):
        if reason := _rejection(schedule_of, section):
            yield _problem(config, SEQLEN, reason, "Complete the section, or switch it off.")
        elif (least := _least(schedule_of(section))) < 1:
            yield _problem(config, SEQLEN, _too_short(least, "difficulty_step"), "Raise min_difficulty.")


def _least(schedule: Schedule) -> int:
    """Return the difficulty of the first step; 1 for a custom schedule, which is unknown here."""
    return 1 if isinstance(schedule, Custom) else schedule.at(1)


def _too_short(least: int, multiple: str) -> str:
    return f"the first step would have sequences of {least} tokens (rounded down to a multiple of {multiple})"


def _check_samples(config: Config) -> Iterator[Problem]:
    for section in sample_curriculum(config):
        if not section.curriculum_metrics:
            yield _problem(config, METRICS, "curriculum_metrics names no metric", 'Add one: {"seqlen": {...}}.')
        for name, metric in section.curriculum_metrics.items():
            key = f"{METRICS}.curriculum_metrics.{name}"
            if reason := _rejection(schedule_of, metric):
                yield _problem(config, key, reason, "Complete the metric, or leave it out.")
            if missing := _missing_files(name, metric):
                yield _problem(
                    config,
                    key,
                    f"{missing} is missing",
                    f'zengine.data.DataAnalyzer writes them; only "{MEASURED}" is measured without files.',
                )
        for _ in dynamic_batching(config):
            yield _problem(
                config,
                METRICS,
                f"{METRICS}.enabled and {PACKING}.enabled are both on, and each of them composes the batches",
                "Keep one of them.",
            )


def _missing_files(name: str, metric: CurriculumMetric) -> str:
    """Return the missing path of a metric; "" if it has all it needs."""
    needs_values = metric.difficulty_type == "value"
    if metric.clustering_type == "single_cluster":
        return ""
    if not metric.index_to_sample_path:
        is_measured = name == MEASURED and not metric.index_to_metric_path
        return "" if is_measured else "index_to_sample_path"
    return "index_to_metric_path" if needs_values and not metric.index_to_metric_path else ""


def _check_batches(config: Config) -> Iterator[Problem]:
    for section in dynamic_batching(config):
        if reason := _rejection(packing_of, section):
            yield _problem(config, PACKING, reason, "Set max_tokens to what a micro-batch can hold.")


def _check_layers(config: Config) -> Iterator[Problem]:
    for section in random_ltd(config):
        ids, total, named = section.random_ltd_layer_id, section.total_layer_num, section.random_ltd_layer_num
        if not ids or not total:
            yield _problem(config, LTD, "total_layer_num and random_ltd_layer_id are needed", "Name the layers.")
        elif len(set(ids)) != len(ids) or max(ids) >= total:
            reason = f"random_ltd_layer_id {list(ids)} must be different numbers below total_layer_num = {total}"
            yield _problem(config, LTD, reason, "Layers count from 0.")
        if named and named != len(ids):
            reason = f"random_ltd_layer_num = {named}, and random_ltd_layer_id names {len(ids)}"
            yield _problem(config, LTD, reason, "Leave random_ltd_layer_num out.")
        schedule = f"{LTD}.random_ltd_schedule"
        if reason := _rejection(ltd_schedule_of, section.random_ltd_schedule):
            yield _problem(config, schedule, reason, "Complete the schedule.")
        elif (least := ltd_schedule_of(section.random_ltd_schedule).at(0)) < 1:
            yield _problem(config, schedule, _too_short(least, "seq_per_step"), "Raise min_value.")


def unused_keys(section: CurriculumLearning | CurriculumMetric, prefix: str, config: Config) -> list[str]:
    """Return the given keys of schedule_config that this schedule_type does not use."""
    used = _USED.get(section.schedule_type, set())
    start = f"{prefix}.schedule_config."
    return [key for key in config.given if key.startswith(start) and key.removeprefix(start) not in used]


# -- sequence parallelism ------------------------------------------------------------------------


def check_whole_sequences(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Reject enabled sections that need whole sequences if sequence parallelism splits them."""
    size = parallel.degrees.sequence
    if size == 1:
        return []
    asked = {f"{SEQLEN}.enabled": curriculum(config), f"{LTD}.enabled": random_ltd(config)}
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=True,
            reason=f"it selects tokens of whole sequences, but each of {size} ranks has a part of a sequence "
            f"(sequence_parallel_size)",
            suggestion="Leave the section out, or set sequence_parallel_size to 1.",
        )
        for key, is_on in asked.items()
        if is_on
    ]
