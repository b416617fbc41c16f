"""Data plan: one frozen value for each object that is built from the data sections."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from zengine.config.keys.data import CurriculumLearning, CurriculumMetric, DynamicBatchingSection
from zengine.config.plan.data_rules import (
    METRICS,
    SEQLEN,
    curriculum,
    dynamic_batching,
    ltd_schedule_of,
    packing_of,
    random_ltd,
    sample_curriculum,
    schedule_of,
    unused_keys,
)
from zengine.config.reading.load import Config
from zengine.data.order.curriculum import DifficultyType
from zengine.data.order.packing import Packing
from zengine.data.order.schedules import Schedule

__all__ = ["DataPlan", "LtdPlan", "MetricPlan", "PackingPlan", "data_notices", "data_plan"]


@attrs.frozen(kw_only=True)
class MetricPlan:
    """One metric of a curriculum over samples."""

    name: str
    schedule: Schedule
    by: DifficultyType
    parts: int  # for percentiles: the difficulty that means all samples
    samples_path: str  # "" here and in `metrics_path`: sample lengths, measured at start
    metrics_path: str


@attrs.frozen(kw_only=True)
class PackingPlan:
    """Dynamic batching."""

    packing: Packing
    lengths_path: str  # "": measured at start
    lr_scaling: str  # "linear" | "sqrt" | "none"


@attrs.frozen(kw_only=True)
class LtdPlan:
    """Random-LTD."""

    schedule: Schedule
    num_layers: int
    layer_ids: tuple[int, ...]
    mask_name: str  # keyword of the mask; "": none
    is_causal: bool  # masks without a batch dimension are causal
    sequence_axis: int  # of the hidden state: 1, or 0 for sequence-first layouts


@attrs.frozen(kw_only=True)
class DataPlan:
    """Order of the data and the features that change it; an empty tuple means "off"."""

    drop_last: bool = False  # leave out the last, partial batch of an epoch
    seed: int = 1234  # of the order of samples (data_efficiency.seed)
    num_workers: int = 0  # processes that fetch samples
    pin_memory: bool = False  # page-locked batches
    prefetch: int = 1  # batches on the device ahead of use; 0: batches stay on the host
    num_epochs: int = 1000  # in one iteration over a curriculum's loader
    metrics: tuple[MetricPlan, ...] = ()  # curriculum of samples
    packing: tuple[PackingPlan, ...] = ()  # dynamic batching: one or none
    seqlen: tuple[Schedule, ...] = ()  # curriculum of lengths: one or none
    ltd: tuple[LtdPlan, ...] = ()  # random-LTD: one or none
    # As written, for loops that pack themselves.
    dynamic_batching: DynamicBatchingSection = attrs.field(factory=DynamicBatchingSection)
    rows: tuple[tuple[str, Any], ...] = attrs.field(default=(), eq=False)  # (key, value) for the plan's table

    @property
    def needs_data(self) -> str:
        """Section that requires training_data; "" if there is none."""
        if self.metrics:
            return "data_efficiency.data_sampling.curriculum_learning"
        return "data_efficiency.data_sampling.dynamic_batching" if self.packing else ""


def data_plan(config: Config) -> DataPlan:
    """Return the data plan of a config that satisfies `data_rules`."""
    settings = config.settings
    sampling = settings.data_efficiency.data_sampling
    fetches = settings.data_efficiency.enabled and sampling.enabled
    return DataPlan(
        drop_last=settings.dataloader_drop_last,
        seed=settings.data_efficiency.seed,
        num_workers=sampling.num_workers if fetches else 0,
        pin_memory=fetches and sampling.pin_memory,
        prefetch=settings.dataloader_prefetch,
        num_epochs=sampling.num_epochs,
        metrics=tuple(
            _metric(name, metric)
            for section in sample_curriculum(config)
            for name, metric in section.curriculum_metrics.items()
        ),
        packing=tuple(
            PackingPlan(
                packing=packing_of(section),
                lengths_path=section.metrics_path,
                lr_scaling=section.lr_scaling_method,
            )
            for section in dynamic_batching(config)
        ),
        seqlen=tuple(schedule_of(section) for section in curriculum(config)),
        ltd=tuple(
            LtdPlan(
                schedule=ltd_schedule_of(section.random_ltd_schedule),
                num_layers=section.total_layer_num,
                layer_ids=section.random_ltd_layer_id,
                mask_name=section.model_mask_name,
                is_causal=section.model_type == "decoder",
                sequence_axis=1 if section.hidden_state_order == "batch_seq_dim" else 0,
            )
            for section in random_ltd(config)
        ),
        dynamic_batching=sampling.dynamic_batching,
        rows=tuple(_rows(config)),
    )


def _metric(name: str, metric: CurriculumMetric) -> MetricPlan:
    is_single = metric.clustering_type == "single_cluster"
    by = DifficultyType.SINGLE_CLUSTER if is_single else DifficultyType(metric.difficulty_type)
    return MetricPlan(
        name=name,
        schedule=schedule_of(metric),
        by=by,
        parts=metric.max_difficulty,
        samples_path=metric.index_to_sample_path,
        metrics_path=metric.index_to_metric_path if by is DifficultyType.VALUE else "",
    )


def _rows(config: Config) -> Iterator[tuple[str, Any]]:
    settings = config.settings
    yield from _leaves(settings.curriculum_learning, SEQLEN)
    yield from _leaves(settings.data_efficiency, "data_efficiency")


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield key and value of every setting of a section; of one that is off, the switch and the seed only."""
    members = section.items() if isinstance(section, Mapping) else _fields(section)
    if not getattr(section, "enabled", True):
        members = [(name, value) for name, value in members if name in ("enabled", "seed")]
    for name, value in members:
        key = f"{prefix}.{name}"
        if attrs.has(type(value)) or isinstance(value, Mapping):
            yield from _leaves(value, key)
        else:
            yield key, "(none)" if value in ("", ()) else list(value) if isinstance(value, tuple) else value


def _fields(section: Any) -> list[tuple[str, Any]]:
    return [(field.name, getattr(section, field.name)) for field in attrs.fields(type(section))]


def data_notices(config: Config) -> list[str]:
    """Return notices of keys without effect in this combination, and of unexpected defaults."""
    settings, notices = config.settings, []
    efficiency = settings.data_efficiency
    switches = {
        "data_efficiency.data_sampling.enabled": efficiency.data_sampling.enabled,
        "data_efficiency.data_routing.enabled": efficiency.data_routing.enabled,
    }
    for key in (key for key, is_on in switches.items() if is_on and not efficiency.enabled):
        notices.append(f"{config.origin(key)}: {key} has no effect here: data_efficiency.enabled is false")
    key = "data_efficiency.data_sampling.num_epochs"
    if key in config.given and efficiency.data_sampling.enabled and not sample_curriculum(config):
        notices.append(f"{config.origin(key)}: {key} has no effect here: no curriculum over samples is enabled")
    sections: list[tuple[str, CurriculumLearning | CurriculumMetric]] = [
        (SEQLEN, each) for each in curriculum(config)
    ]
    for section in sample_curriculum(config):
        sections += [
            (f"{METRICS}.curriculum_metrics.{name}", each) for name, each in section.curriculum_metrics.items()
        ]
        if "data_efficiency.data_sampling.num_epochs" not in config.given:
            notices.append(
                f"{config.origin(f'{METRICS}.enabled')}: as in DeepSpeed, one iteration over the loader of a "
                f"curriculum takes {efficiency.data_sampling.num_epochs} epochs; "
                "data_efficiency.data_sampling.num_epochs sets the number (1: a for loop is an epoch)"
            )
        if settings.dataloader_drop_last:
            notices.append(
                "dataloader_drop_last has no effect here: a curriculum's batches continue in the next epoch"
            )
    for prefix, each in sections:
        for key in unused_keys(each, prefix, config):
            notices.append(f'{config.origin(key)}: {key} has no effect here: schedule_type is "{each.schedule_type}"')
    return notices
