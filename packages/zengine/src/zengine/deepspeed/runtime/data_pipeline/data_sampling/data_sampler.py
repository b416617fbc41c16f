"""`deepspeed.runtime.data_pipeline.data_sampling.data_sampler`: micro-batches of a curriculum, for custom loops.

The order is `zengine.data.CurriculumOrder`'s: each pass visits every admitted sample once, without files of clusters
(`data_cluster_path` is not used).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

import attrs
import numpy as np

from zengine.config.keys.data import CurriculumMetric, ScheduleConfig
from zengine.config.plan.data_rules import schedule_of
from zengine.data.metrics import MetricIndex
from zengine.data.order.curriculum import (
    CurriculumOrder,
    DifficultyType,
    Limit,
    Permutations,
    Position,
    with_schedules,
)
from zengine.data.order.order import Order
from zengine.data.order.schedules import with_custom_functions

__all__ = ["DeepSpeedDataSampler"]


@final
class DeepSpeedDataSampler:
    """Iterates over this rank's micro-batches, each a list of indices; a `batch_sampler` of torch's DataLoader."""

    def __init__(
        self,
        data_efficiency_config: Mapping[str, Any],
        one_epoch_total_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        data_parallel_group: Any,
        gradient_accumulation_steps: int,
        global_rank: int,
        drop_last: bool = True,
    ) -> None:
        """Take the section `data_efficiency`, with "seed", and "data_sampling" with "curriculum_learning".

        data_parallel_group, global_rank: ignored; every rank computes the order itself.
        drop_last: ignored; a batch that reaches the end of a pass continues in the next one.

        Raises ValueError for a wrong rank, a missing key, or a metric that does not cover the samples.
        """
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(
                f"data_parallel_rank is {data_parallel_rank}, but must be in 0..{data_parallel_size - 1}"
            )
        sampling = data_efficiency_config["data_sampling"]
        section = sampling.get("curriculum_learning", {})
        metrics = section.get("curriculum_metrics", {}) if section.get("enabled") else {}
        base = Order(
            num_samples=one_epoch_total_samples,
            micro_batch_size=micro_batch_size,
            world_size=data_parallel_size,
            seed=data_efficiency_config.get("seed", 1234),
        )
        limits = tuple(_limit(name, dict(metric), one_epoch_total_samples) for name, metric in metrics.items())
        self.data_efficiency_config, self.data_parallel_rank = data_efficiency_config, data_parallel_rank
        self.one_epoch_total_samples, self.micro_batch_size = one_epoch_total_samples, micro_batch_size
        self.total_samples = one_epoch_total_samples * sampling.get("num_epochs", 1000)
        self.micro_batch_times_data_parallel_size = base.stride
        self.gradient_accumulation_steps = gradient_accumulation_steps
        self.global_batch_size = base.stride * gradient_accumulation_steps
        self.consumed_samples, self.curriculum_step = 0, 0
        self.current_difficulties: dict[str, int] = {}
        self._position = Position()
        self._order = CurriculumOrder(base=base, limits=limits, accumulation=gradient_accumulation_steps)

    def __len__(self) -> int:
        """Return the samples of all epochs."""
        return int(self.total_samples)

    def set_custom_curriculum_learning_schedule(self, schedule_func_dict: Mapping[str, Callable[[int], int]]) -> None:
        """Set the functions (step -> difficulty) of metrics with the schedule "custom", by name."""
        schedules = with_custom_functions(
            {each.name: each.schedule for each in self._order.limits}, schedule_func_dict
        )
        self._order = attrs.evolve(self._order, limits=with_schedules(self._order.limits, schedules))

    def get_start_end_idx(self, batch_len: int | None = None) -> tuple[int, int]:
        """Return this rank's [begin, end) in a micro-batch of all ranks, or in a shorter one of `batch_len`."""
        length, size = batch_len or self._order.base.stride, self._order.base.world_size
        begin, end = (round(rank * length / size) for rank in (self.data_parallel_rank, self.data_parallel_rank + 1))
        return begin, end

    def __iter__(self) -> Iterator[list[int]]:
        """Yield micro-batches from the position on, until all epochs' samples are consumed."""
        permutations = Permutations(self._order.base)
        begin, end = self.get_start_end_idx()
        while self.consumed_samples + self._order.base.stride <= self.total_samples:
            step = self._position.step
            indices, self._position = self._order.advance(self._position, permutations)
            self.curriculum_step, self.current_difficulties = step + 1, self._order.difficulties(step)
            self.consumed_samples += len(indices)
            yield indices[begin:end].tolist()

    def state_dict(self) -> dict[str, Any]:
        """Return the position; `curriculum_step` and `current_difficulties` are those of the last micro-batch."""
        return {
            "consumed_samples": self.consumed_samples,
            "curriculum_step": self.curriculum_step,
            "current_difficulties": dict(self.current_difficulties),
            "position": attrs.asdict(self._position),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a position.  Raises KeyError for the state of DeepSpeed's sampler, which has none."""
        self._position = Position(**state_dict["position"])
        self.consumed_samples = int(state_dict["consumed_samples"])
        self.curriculum_step = int(state_dict["curriculum_step"])
        self.current_difficulties = dict(state_dict["current_difficulties"])


def _limit(name: str, metric: dict[str, Any], num_samples: int) -> Limit:
    """Return the limit of a member of "curriculum_metrics"."""
    details: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in dict(metric.pop("schedule_config", None) or {}).items()
    }
    known = {field.name for field in attrs.fields(CurriculumMetric)}
    if unknown := set(metric) - known:
        raise ValueError(f"curriculum_metrics.{name} has unknown keys {sorted(unknown)}; known are {sorted(known)}")
    section = CurriculumMetric(**metric, schedule_config=ScheduleConfig(**details))
    if section.clustering_type == "single_cluster":
        kind, index = DifficultyType.SINGLE_CLUSTER, MetricIndex.of(np.zeros(num_samples, np.int8), name)
    else:
        kind = DifficultyType(section.difficulty_type)
        values = section.index_to_metric_path if kind is DifficultyType.VALUE else ""
        index = MetricIndex.load(section.index_to_sample_path, values, name)
    index.check_covers(num_samples)
    return Limit.make(schedule_of(section), kind, index, section.max_difficulty)
