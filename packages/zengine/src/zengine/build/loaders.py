"""Loaders of a rank by the plan's data sections, and DeepSpeed's calls about data.

The plan chooses a plain loader, a curriculum or batches by tokens; this file reads the metrics that they need, and
makes the loader from the feed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from zengine import features
from zengine.config import ConfigError, DataPlan, Plan, Problem
from zengine.data.loaders.base import Loader, PostProcess
from zengine.data.loaders.factory import LoaderFactory, is_indexed, make_fetcher
from zengine.data.metrics import SAMPLE_FILE, MetricError, MetricIndex, lengths_of, open_array
from zengine.data.order.curriculum import DifficultyType, Limit
from zengine.engine.feature import Feature

if TYPE_CHECKING:
    from zengine.engine.parts import Run

log = logging.getLogger("zengine.data")

CustomSchedules = Mapping[str, Callable[[int], int]] | Callable[[int], int]


@runtime_checkable
class HasCustomSchedule(Protocol):
    """Part whose schedule the caller may set."""

    def set_custom_schedule(self, functions: Any) -> None: ...


def check_data(plan: Plan, training_data: Any) -> None:
    """Check that data exist for a section that selects samples, before ranks depend on each other.

    Raises:
        ConfigError: `training_data` is missing, or is a stream whose samples have no index.
    """
    section = plan.data.needs_data
    if not section or (training_data is not None and is_indexed(training_data)):
        return
    given = "initialize() got no training_data" if training_data is None else _stream(training_data)
    problem = Problem(
        key=f"{section}.enabled",
        given=True,
        reason=f"{given}, and the section selects the samples of each batch",
        suggestion="Pass training_data= (a dataset with a length and an index), or switch the section off.",
    )
    raise ConfigError("initialize()", [problem])


def _stream(training_data: Any) -> str:
    return f"training_data is a {type(training_data).__name__}, which has no length and index"


def make_feed(
    plan: Plan, *, rank: int, device: torch.device, collate_fn: Callable[[list[Any]], Any] | None = None
) -> LoaderFactory:
    """Return the loader factory of replica `rank`; all ranks of one replica get the same samples."""
    data, is_shared = plan.data, plan.parallel.model_parallel_size * plan.parallel.degrees.sequence > 1
    return LoaderFactory(
        micro_batch_size=plan.batch.micro_batch_size,
        rank=rank,
        world_size=plan.batch.replicas,
        accumulation=plan.batch.accumulation,
        seed=data.seed,
        drop_last=data.drop_last,
        uneven=plan.batch.uneven,
        fetcher=make_fetcher(
            collate_fn=collate_fn,
            num_workers=data.num_workers,
            pin_memory=data.pin_memory,
            device=device,
            prefetch=data.prefetch,
            shared_seed=(rank,) if is_shared else (),
        ),
    )


def training_loader(dataset: Any, data: DataPlan, feed: LoaderFactory) -> Loader:
    """Return the loader that the plan asks for.

    Raises:
        TypeError: `dataset` is not a dataset.
        ValueError: it is too small, or a metric does not fit it.
    """
    if data.metrics:
        limits = tuple(
            Limit.make(metric.schedule, metric.by, _index(metric, dataset), metric.parts) for metric in data.metrics
        )
        return feed.curriculum(dataset, limits, num_epochs=data.num_epochs)
    for chosen in data.packing:
        return feed.packed(dataset, _lengths(chosen.lengths_path, dataset), chosen.packing)
    return feed.plain(dataset)


def data_features(data: DataPlan) -> tuple[Feature, ...]:
    """Return the features of the data sections; sequences are truncated before tokens are dropped."""
    return (
        *(features.SeqlenCurriculum(schedule) for schedule in data.seqlen),
        *(features.SampleDifficulty() for _ in data.metrics[:1]),
        *(features.DynamicBatching(chosen.lr_scaling) for chosen in data.packing),
        *(features.RandomLtd(plan) for plan in data.ltd),
    )


def _index(metric: Any, dataset: Any) -> MetricIndex:
    """Return the index of a metric from its files, or measured sample lengths without files."""
    if metric.samples_path:
        return MetricIndex.load(metric.samples_path, metric.metrics_path, metric.name)
    if metric.by is DifficultyType.SINGLE_CLUSTER:
        return MetricIndex.of(np.zeros(LoaderFactory.length_of(dataset), dtype=np.int8), metric.name)
    return MetricIndex.of(_measure_lengths(dataset), metric.name)


def _lengths(path: str, dataset: Any) -> NDArray[np.int64]:
    """Return the tokens of each sample, (num_samples,), from a .npy file or an analyzer's folder, or measured."""
    if not path:
        return _measure_lengths(dataset)
    file = path if path.endswith(".npy") else f"{path}/{SAMPLE_FILE}"
    try:
        lengths: NDArray[np.int64] = open_array(file).astype(np.int64, casting="same_kind")
    except (OSError, ValueError, TypeError) as error:
        raise MetricError(
            f"dynamic_batching.metrics_path: {file} is not a file of lengths ({error}); zengine.data.DataAnalyzer "
            f"writes {SAMPLE_FILE}"
        ) from None
    return lengths


def _measure_lengths(dataset: Any) -> NDArray[np.int64]:
    log.info("measuring the lengths of %d samples; a metric file avoids this", LoaderFactory.length_of(dataset))
    return lengths_of(dataset)


def user_loader(
    run: Run,
    dataset: Any,
    *,
    batch_size: int | None,
    route: str,
    pin_memory: bool,
    data_sampler: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int | None,
) -> Loader:
    """Return a loader over a caller's dataset; see `DeepSpeedEngine.deepspeed_io`."""
    if not is_indexed(dataset) and not isinstance(dataset, IterableDataset):
        raise ValueError(
            f"deepspeed_io(dataset={type(dataset).__name__}): a torch Dataset is needed, one with __len__ and "
            "__getitem__(index) or an IterableDataset; pass the dataset itself, not a DataLoader over it"
        )
    if route not in ("train", "eval", "predict"):
        raise ValueError(f'deepspeed_io(route={route!r}): "train", "eval" or "predict" is needed')
    data, device = run.plan.data, run.device
    base = make_feed(run.plan, rank=run.parts.groups.get_data_parallel_rank(), device=device)
    fetcher = make_fetcher(
        collate_fn=collate_fn,
        num_workers=data.num_workers if num_workers is None else num_workers,
        pin_memory=pin_memory,
        device=device,
        prefetch=data.prefetch,
        shared_seed=base.fetcher.shared_seed,
    )
    size = base.micro_batch_size if batch_size is None else batch_size
    uneven = base.uneven if route == "train" and batch_size is None else ()
    feed = attrs.evolve(base, micro_batch_size=size, fetcher=fetcher, uneven=uneven)
    if data_sampler is not None:
        return feed.sampled(dataset, data_sampler)
    return feed.plain(dataset, shuffle=route == "train")


def set_post_process(run: Run, post_process: PostProcess | None) -> None:
    """See `DeepSpeedEngine.set_data_post_process_func`."""
    if run.parts.loader is None:
        raise ValueError("set_data_post_process_func() needs a loader: pass training_data= to initialize()")
    run.parts.loader.post_process = post_process


def set_custom_schedules(run: Run, features: Sequence[Feature], functions: CustomSchedules) -> None:
    """See `DeepSpeedEngine.set_custom_curriculum_learning_schedule`."""
    parts = [part for part in (*features, run.parts.loader) if isinstance(part, HasCustomSchedule)]
    if not parts:
        raise ValueError("set_custom_curriculum_learning_schedule(): no curriculum is on; enable one in the config")
    for part in parts:
        part.set_custom_schedule(functions)
