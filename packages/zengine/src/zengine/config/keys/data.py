"""Keys of the data: curricula, dynamic batching, random-LTD.

Zero and an empty name stand for "not given"; `plan.data_rules` checks the keys that a section requires when it is on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import attrs

from zengine.config.grammar.kinds import COUNT, TEXT, TRUTH, choice, list_of, null_or, number, whole
from zengine.config.grammar.table import ignored, named_members, section, section_of, setting, unavailable

COUNTS = list_of(COUNT, "a list of whole numbers >= 0")

SCHEDULES = choice("fixed_linear", "fixed_root", "fixed_discrete", "custom")


@attrs.frozen(kw_only=True)
class ScheduleConfig:
    """schedule_config of a curriculum; schedule_type decides which keys have an effect."""

    total_curriculum_step: int = setting(COUNT, 0, "fixed_linear, fixed_root: steps until the maximum")
    difficulty_step: int = setting(whole(1), 1, "fixed_linear, fixed_root: round down to multiples of it")
    root_degree: float = setting(
        number(above=0), 2.0, "fixed_root: degree of the root; 1 is linear, larger values grow faster at first"
    )
    difficulty: tuple[int, ...] = setting(COUNTS, (), "fixed_discrete: list of difficulties")
    max_step: tuple[int, ...] = setting(COUNTS, (), "fixed_discrete: last step of each difficulty but the last")


@attrs.frozen(kw_only=True)
class CurriculumLearning:
    """curriculum_learning: sequence length grows with the steps."""

    enabled: bool = setting(TRUTH, False, "limit the sequence length by a schedule")
    curriculum_type: str = setting(choice("seqlen"), "seqlen", "quantity that is limited: tokens of a sequence")
    min_difficulty: int = setting(COUNT, 0, "tokens at the start")
    max_difficulty: int = setting(COUNT, 0, "tokens at the end")
    schedule_type: str = setting(null_or(SCHEDULES, ""), "", "schedule of the difficulty")
    schedule_config: ScheduleConfig = section(ScheduleConfig)


@attrs.frozen(kw_only=True)
class CurriculumMetric:
    """Member of curriculum_metrics, under the name of the metric."""

    index_to_sample_path: str = setting(null_or(TEXT, ""), "", "samples by difficulty: .npy, or a Megatron index")
    index_to_metric_path: str = setting(null_or(TEXT, ""), "", "metric of each sample, in that order")
    difficulty_type: str = setting(choice("value", "percentile"), "value", "unit of difficulties")
    clustering_type: str = setting(
        choice("schedule_based", "single_cluster"), "schedule_based", "single_cluster: no sample is held back"
    )
    min_difficulty: int = setting(COUNT, 0, "difficulty at the start")
    max_difficulty: int = setting(
        COUNT, 0, "difficulty at the end; for percentiles, the number that means all samples"
    )
    schedule_type: str = setting(null_or(SCHEDULES, ""), "", "schedule of the difficulty")
    schedule_config: ScheduleConfig = section(ScheduleConfig)


def _by_name(**members: Any) -> MappingProxyType[str, Any]:
    """Return settings by the names that the user chose."""
    return MappingProxyType(members)


@attrs.frozen(kw_only=True)
class DataCurriculum:
    """data_efficiency.data_sampling.curriculum_learning: samples in order of difficulty."""

    enabled: bool = setting(TRUTH, False, "hold back samples that are too difficult for the step")
    curriculum_metrics: Mapping[str, CurriculumMetric] = named_members(section_of(CurriculumMetric), _by_name)


@attrs.frozen(kw_only=True)
class DynamicBatchingSection:
    """data_efficiency.data_sampling.dynamic_batching: batches by number of tokens."""

    enabled: bool = setting(TRUTH, False, "form micro-batches by number of tokens")
    metrics_path: str = setting(
        null_or(TEXT, ""), "", "tokens of each sample (.npy); empty: every sample is read once to count them"
    )
    lr_scaling_method: str = setting(
        choice("linear", "sqrt", "none", fold=str.lower), "linear", "scaling of the learning rate with the batch size"
    )
    min_batch_size: int = setting(whole(1), 1, "least samples of a micro-batch; smaller ones are left out")
    max_batch_size: int = setting(null_or(COUNT, 0), 0, "most samples of a micro-batch; 0: as many as fit")
    sequence_picking_order: str = setting(
        choice("dataloader", "random", "seqlen", fold=str.lower), "dataloader", "order in which samples are packed"
    )
    max_tokens: int = setting(COUNT, 0, "most tokens of a micro-batch")


@attrs.frozen(kw_only=True)
class DataSampling:
    """data_efficiency.data_sampling: fetching and order of samples."""

    enabled: bool = setting(TRUTH, False, "use this section")
    num_epochs: int = setting(whole(1), 1000, "epochs in one iteration over a curriculum's loader")
    num_workers: int = setting(COUNT, 0, "worker processes that fetch samples; 0: the rank itself")
    pin_memory: bool = setting(TRUTH, False, "page-locked batches")
    curriculum_learning: DataCurriculum = section(
        DataCurriculum,
        {"data_cluster_path": ignored(TEXT, why="the order is computed on demand, without files")},
        switch="enabled",
    )
    dynamic_batching: DynamicBatchingSection = section(
        DynamicBatchingSection,
        {"verbose": ignored(TRUTH, False, why="the important events are always logged")},
        switch="enabled",
    )


@attrs.frozen(kw_only=True)
class LtdScheduleConfig:
    """random_ltd_schedule.schedule_config."""

    require_steps: int = setting(COUNT, 0, "steps until the maximum")
    seq_per_step: int = setting(whole(1), 1, "round down to multiples of it")


@attrs.frozen(kw_only=True)
class LtdSchedule:
    """random_ltd.random_ltd_schedule: number of tokens that the layers process."""

    min_value: int = setting(COUNT, 0, "tokens at the start")
    max_value: int = setting(COUNT, 0, "tokens at the end; shorter sequences are not changed")
    schedule_type: str = setting(choice("fixed_linear"), "fixed_linear", "schedule of the number of tokens")
    schedule_config: LtdScheduleConfig = section(LtdScheduleConfig)


@attrs.frozen(kw_only=True)
class RandomLtdSection:
    """data_efficiency.data_routing.random_ltd: some layers process a random subset of the tokens."""

    enabled: bool = setting(TRUTH, False, "let the listed layers skip tokens")
    total_layer_num: int = setting(COUNT, 0, "layers of the model: the length of its module list")
    random_ltd_layer_num: int = setting(COUNT, 0, "number of listed layers; checked")
    random_ltd_layer_id: tuple[int, ...] = setting(COUNTS, (), "indices of the layers in that list, from 0")
    model_mask_name: str = setting(null_or(TEXT, ""), "", "keyword argument of a layer's attention mask; empty: none")
    model_type: str = setting(
        choice("decoder", "encoder"), "decoder", "decoder: a mask without a batch dimension is causal"
    )
    hidden_state_order: str = setting(
        choice("batch_seq_dim", "seq_batch_dim"), "batch_seq_dim", "axes of the hidden state"
    )
    random_ltd_schedule: LtdSchedule = section(LtdSchedule)


@attrs.frozen(kw_only=True)
class DataRouting:
    """data_efficiency.data_routing: routing of tokens."""

    enabled: bool = setting(TRUTH, False, "use this section")
    random_ltd: RandomLtdSection = section(
        RandomLtdSection,
        {"layer_token_lr_schedule": unavailable("a learning rate by number of layer tokens", {}, is_open=True)},
        switch="enabled",
    )


@attrs.frozen(kw_only=True)
class DataEfficiency:
    """data_efficiency: sampling and routing of data."""

    enabled: bool = setting(TRUTH, False, "use data_sampling and data_routing; the seed always has an effect")
    seed: int = setting(COUNT, 1234, "seed of the order of samples")
    data_sampling: DataSampling = section(DataSampling, switch="enabled")
    data_routing: DataRouting = section(DataRouting, switch="enabled")


@attrs.frozen(kw_only=True, slots=False)
class DataKeys:
    """Sections of the top level about the data."""

    curriculum_learning: CurriculumLearning = section(CurriculumLearning, switch="enabled")
    data_efficiency: DataEfficiency = section(DataEfficiency)
