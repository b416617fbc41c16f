"""`deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr`: batches by tokens, for custom loops.

Micro-batches hold as many samples as fit into `max_tokens`, so batches differ in size; a schedule scales the learning
rate by the size of the batch that comes next.  An engine does both by itself (`data_efficiency.data_sampling.
dynamic_batching` and `training_data=`); these functions give loader and schedule to a loop that drives them.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, final

import numpy as np
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader, DistributedSampler

from zengine.deepspeed.comm.world import get_rank, get_world_size
from zengine.deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DistributedDataAnalyzer
from zengine.deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset
from zengine.pipeline_engine import PipelineEngine

__all__ = [
    "VariableBatchSizeLR",
    "batch_by_seqlens",
    "dataloader_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size",
    "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed",
    "lr_scheduler_for_variable_batch_size",
    "scale_lr",
]

log = logging.getLogger("zengine.data")

MicroBatch = tuple[int, list[int]]  # (number of the batch, samples)
Sample = tuple[int, int]  # (length, number)
Collate = Callable[[list[Any]], Any]


def batch_by_seqlens(
    seqlens: Sequence[int],
    max_tokens: int,
    sequence_ids_per_mb: Sequence[int] | None = None,
    min_batch_size: int = 1,
    max_batch_size: int | None = None,
    sequence_picking_order: str = "dataloader",
    effective_batch_size: int = 1,
    required_microbatches_of_same_size: bool = False,
    verbose: bool = False,
    seed: int | None = None,
) -> tuple[list[MicroBatch], list[int], list[int]]:
    """Pack samples into micro-batches of at most `max_tokens`.

    sequence_ids_per_mb: the samples to use; None: all.
    sequence_picking_order: "dataloader" (as given), "random" or "seqlen" (ascending).
    effective_batch_size: micro-batches of one batch, over ranks and micro-steps.
    required_microbatches_of_same_size: the micro-batches of a batch have equally many samples.

    Returns the micro-batches, the number of samples of each batch, and its longest length.  Samples over `max_tokens`
    and a remainder that makes no whole batch are left out.

    Raises ValueError for another order, or if no batch is complete.
    """
    if sequence_picking_order not in ("random", "seqlen", "dataloader"):
        raise ValueError(
            f"sequence_picking_order must be random, seqlen or dataloader, got {sequence_picking_order!r}"
        )
    chosen = range(len(seqlens)) if sequence_ids_per_mb is None else sequence_ids_per_mb
    samples = [(int(seqlens[number]), int(number)) for number in chosen]
    if sequence_picking_order == "random":
        random.Random(seed).shuffle(samples)
    elif sequence_picking_order == "seqlen":
        samples.sort()
    too_long = [number for length, number in samples if length > max_tokens]
    if too_long:
        log.warning("%d samples exceed %d tokens and are left out: %s", len(too_long), max_tokens, too_long)
        samples = [sample for sample in samples if sample[0] <= max_tokens]
    width = effective_batch_size if required_microbatches_of_same_size else 1
    limits = _Limits(max_tokens, min_batch_size, max_batch_size)
    found = _pack(samples, width, limits)
    found = found[: len(found) - len(found) % effective_batch_size]
    if not found:
        raise ValueError(
            f"{len(samples)} samples do not make one batch of {effective_batch_size} micro-batches of at most "
            f"{max_tokens} tokens: lower max_tokens or the batch size, or use more data"
        )
    batches = [found[at : at + effective_batch_size] for at in range(0, len(found), effective_batch_size)]
    micro = [(at, [number for _, number in each]) for at, batch in enumerate(batches) for each in batch]
    if verbose:
        for at, batch in enumerate(batches):
            log.info("batch %d: samples %s", at, [[number for _, number in each] for each in batch])
    longest = [max(length for each in batch for length, _ in each) for batch in batches]
    return micro, [sum(map(len, batch)) for batch in batches], longest


@final
class _Limits:
    """Limits of a micro-batch."""

    def __init__(self, max_tokens: int, least: int, most: int | None) -> None:
        self.max_tokens, self.least, self.most = max_tokens, least, most

    def allow(self, group: Sequence[Sample]) -> bool:
        fits = sum(length for length, _ in group) <= self.max_tokens
        return fits and len(group) >= (self.least or 0) and (not self.most or len(group) <= self.most)

    def exceeded(self, group: Sequence[Sample]) -> bool:
        """Return True if more samples cannot make it valid."""
        return sum(length for length, _ in group) > self.max_tokens or bool(self.most and len(group) > self.most)


def _pack(samples: list[Sample], width: int, limits: _Limits) -> list[list[Sample]]:
    """Cut `samples` into runs, as long as possible, of `width` interleaved micro-batches.

    As in DeepSpeed, a run ends before the last sample, and packing ends where no run is valid.
    """
    found: list[list[Sample]] = []
    begin = 0
    while begin < len(samples):
        best: list[list[Sample]] = []
        for end in range(begin + width, len(samples), width):
            groups = [samples[begin + place : end : width] for place in range(width)]
            if any(map(limits.exceeded, groups)):
                break
            best = groups if all(map(limits.allow, groups)) else best
        if not best:
            break
        found += best
        begin += sum(map(len, best))
    return found


def scale_lr(base_batch_size: int, batch_size: int, base_lr: float = 1, method: str | None = "linear") -> float:
    """Return the learning rate of a batch size: "linear" (Goyal et al. 2017), "sqrt" (Krizhevsky 2014), or "none".

    Raises ValueError for another method.
    """
    factors = {"linear": batch_size / base_batch_size, "sqrt": math.sqrt(batch_size / base_batch_size), "none": 1.0}
    name = (method or "none").lower()
    if name not in factors:
        raise ValueError(f"the scaling method must be one of {', '.join(factors)}, got {method!r}")
    return base_lr * factors[name]


def dataloader_for_variable_batch_size(
    dataset: Any,
    microbatch_ids: Sequence[MicroBatch],
    batch_max_seqlens: Sequence[int],
    dataloader_rank: int = 0,
    dataloader_batch_size: int = 1,
    dataloader_num_replicas: int = 1,
    dataloader_collate_fn: Collate | None = None,
    dataloader_num_workers: int = 2,
    dataloader_pin_memory: bool = False,
    required_microbatches_of_same_seqlen: bool = False,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
) -> tuple[DataLoader[Any], dict[str, Any]]:
    """Return a loader of the micro-batches of one rank, and the arguments for `engine.deepspeed_io`.

    dataloader_batch_size: micro-batches that are collated into one.
    required_microbatches_of_same_seqlen: `sample_padding_fn` pads each sample to the longest of its batch.

    Raises ValueError if that function is missing.
    """
    if required_microbatches_of_same_seqlen and sample_padding_fn is None:
        raise ValueError("required_microbatches_of_same_seqlen=True needs sample_padding_fn=, which pads a sample")

    def collate(micro_batches: list[MicroBatch]) -> Any:
        samples = []
        for batch, numbers in micro_batches:
            each = [dataset[number] for number in numbers]
            if required_microbatches_of_same_seqlen and sample_padding_fn is not None:
                each = [sample_padding_fn(sample, batch_max_seqlens[batch]) for sample in each]
            samples += each
        return dataloader_collate_fn(samples) if dataloader_collate_fn else samples

    data: Any = microbatch_ids
    sampler: Any = DistributedSampler(data, dataloader_num_replicas, dataloader_rank, shuffle=False)
    shared = {"dataset": data, "batch_size": dataloader_batch_size, "collate_fn": collate}
    shared["pin_memory"] = dataloader_pin_memory
    loader: DataLoader[Any] = DataLoader(**shared, sampler=sampler, num_workers=dataloader_num_workers)
    return loader, {**shared, "data_sampler": sampler, "num_local_io_workers": dataloader_num_workers}


class VariableBatchSizeLR(LRScheduler):
    """Learning rate of another schedule, scaled by the size of the next batch.

    `step(0)` restarts with the first batch; `step()` continues with the next one.
    """

    def __init__(
        self,
        lr_scheduler: Any,
        base_batch_size: int,
        batch_sizes: Sequence[int],
        dataloader: Any,
        lr_scaling_method: str = "linear",
        last_epoch: int = -1,
        verbose: bool = False,
    ) -> None:
        """Scale `lr_scheduler`, whose rate is meant for `base_batch_size` samples."""
        self.base_lr_scheduler, self.dataloader, self.optimizer = lr_scheduler, dataloader, lr_scheduler.optimizer
        self.base_batch_size, self.batch_sizes = base_batch_size, list(batch_sizes)
        self.lr_scaling_method, self.verbose = lr_scaling_method, verbose
        self.base_lrs = list(lr_scheduler.get_lr())
        self.last_epoch = last_epoch
        self.step(0)

    def get_lr(self) -> list[Any]:
        """Return the scaled rate of each group."""
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_last_lr(self) -> list[Any]:
        """Return the rates before scaling."""
        return list(self.base_lr_scheduler.get_last_lr())

    def step(self, epoch: int | None = None) -> None:
        """Advance the other schedule and set the rate of the next batch."""
        unscaled = self.base_lrs if epoch == 0 else self.get_last_lr()
        for group, rate in zip(self.optimizer.param_groups, unscaled):
            group["lr"] = rate
        self.base_lr_scheduler.step(epoch)
        self.last_epoch = self.last_epoch + 1 if epoch is None else epoch
        size = self.batch_sizes[self.last_epoch % len(self.batch_sizes)]
        for group in self.optimizer.param_groups:
            group["lr"] = scale_lr(self.base_batch_size, size, group["lr"], self.lr_scaling_method)
        if self.verbose:
            log.info("batch %d: %d samples, learning rates %s", self.last_epoch, size, self.get_lr())

    def state_dict(self) -> dict[str, Any]:
        """Return the state of both schedules."""
        names = ("base_batch_size", "lr_scaling_method", "batch_sizes", "base_lrs", "last_epoch", "verbose")
        state = {name: getattr(self, name) for name in names}
        return {"base_lr_scheduler": self.base_lr_scheduler.state_dict(), **state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore it."""
        state = dict(state_dict)
        self.base_lr_scheduler.load_state_dict(state.pop("base_lr_scheduler"))
        for name, value in state.items():
            setattr(self, name, value)


def lr_scheduler_for_variable_batch_size(
    base_batch_size: int,
    batch_sizes: Sequence[int],
    dataloader: Any,
    lr_scheduler_or_optimizer: Any,
    lr_scaling_method: str = "linear",
    verbose: bool = False,
) -> VariableBatchSizeLR:
    """Return a schedule that scales a schedule, or the constant rate of an optimizer.

    Raises TypeError for anything else.
    """
    base = lr_scheduler_or_optimizer
    if isinstance(base, Optimizer):
        base = LambdaLR(base, lambda _: 1.0)
    elif not isinstance(getattr(base, "optimizer", None), Optimizer):
        raise TypeError(f"lr_scheduler_or_optimizer must be a schedule or an optimizer, got {type(base).__name__}")
    return VariableBatchSizeLR(
        base, base_batch_size, batch_sizes, dataloader, lr_scaling_method=lr_scaling_method, verbose=verbose
    )


class VariableBatchOptions(TypedDict, total=False):
    """Optional arguments of `get_dataloader_and_lr_scheduler_for_variable_batch_size`, by their functions."""

    dataset_filter_ids: Sequence[int] | None  # batch_by_seqlens: sequence_ids_per_mb
    min_batch_size: int
    max_batch_size: int | None
    sequence_picking_order: str
    required_microbatches_of_same_size: bool
    seed: int | None
    verbose: bool
    dataloader_batch_size: int  # dataloader_for_variable_batch_size
    dataloader_rank: int
    dataloader_num_replicas: int
    dataloader_num_workers: int  # 0 by default
    dataloader_collate_fn: Collate | None
    dataloader_pin_memory: bool
    required_microbatches_of_same_seqlen: bool
    sample_padding_fn: Callable[[Any, int], Any] | None
    lr_scaling_method: str  # lr_scheduler_for_variable_batch_size
    lr_scheduler_or_optimizer: Any


def get_dataloader_and_lr_scheduler_for_variable_batch_size(
    dataset: Any,
    dataset_seqlens: Sequence[int],
    max_tokens: int,
    effective_batch_size: int,
    **options: Unpack[VariableBatchOptions],
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Return (loader of one rank, schedule, arguments for `engine.deepspeed_io`).

    effective_batch_size: micro-batches of a batch, and the batch size that the learning rate is meant for.
    """
    rest: dict[str, Any] = {"dataloader_num_workers": 0, **options}
    packing = ("min_batch_size", "max_batch_size", "sequence_picking_order", "required_microbatches_of_same_size")
    chosen = {name: rest.pop(name) for name in (*packing, "seed") if name in rest}
    numbers, verbose = rest.pop("dataset_filter_ids", None), rest.pop("verbose", False)
    method, base = rest.pop("lr_scaling_method", "linear"), rest.pop("lr_scheduler_or_optimizer", None)
    micro, sizes, longest = batch_by_seqlens(
        dataset_seqlens, max_tokens, numbers, effective_batch_size=effective_batch_size, verbose=verbose, **chosen
    )
    loader, io_arguments = dataloader_for_variable_batch_size(dataset, micro, longest, **rest)
    schedule = lr_scheduler_for_variable_batch_size(effective_batch_size, sizes, loader, base, method, verbose)
    return loader, schedule, io_arguments


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset: Any,
    engine: Any,
    dataset_seqlens: Sequence[int] | None = None,
    dataset_filter_ids: Sequence[int] | None = None,
    dataloader_collate_fn: Collate | None = None,
    sample_padding_fn: Callable[[Any, int], Any] | None = None,
    batch_seqlens_fn: Callable[[Any], Any] | None = None,
) -> tuple[DataLoader[Any], VariableBatchSizeLR, dict[str, Any]]:
    """Return (loader of this rank, schedule, arguments for `engine.deepspeed_io`), by the engine's config.

    dataset_seqlens: the length of each sample.  Without it lengths are read from the files of the analyzer in
        `metrics_path`; without files, `batch_seqlens_fn` (collated batch -> lengths) measures them into files.

    Raises ValueError if "dynamic_batching" is not enabled, or there are no lengths.
    """
    data = engine.config.data
    section = data.dynamic_batching
    if not section.enabled or not section.max_tokens:
        raise ValueError("data_efficiency.data_sampling.dynamic_batching: set enabled to true, and max_tokens")
    if dataset_seqlens is None:
        dataset_seqlens = _lengths(dataset, engine, section.metrics_path, dataloader_collate_fn, batch_seqlens_fn)
    group, is_pipeline = engine.parts.groups.get_data_parallel_group(), isinstance(engine, PipelineEngine)
    return get_dataloader_and_lr_scheduler_for_variable_batch_size(
        dataset=dataset,
        dataset_seqlens=dataset_seqlens,
        dataset_filter_ids=dataset_filter_ids,
        effective_batch_size=engine.train_batch_size(),
        max_tokens=section.max_tokens,
        lr_scaling_method=section.lr_scaling_method,
        sequence_picking_order=section.sequence_picking_order,
        min_batch_size=section.min_batch_size,
        max_batch_size=section.max_batch_size or None,
        dataloader_batch_size=engine.train_micro_batch_size_per_gpu(),
        dataloader_rank=get_rank(group),
        dataloader_num_replicas=get_world_size(group),
        dataloader_num_workers=data.num_workers,
        dataloader_collate_fn=dataloader_collate_fn,
        dataloader_pin_memory=data.pin_memory,
        sample_padding_fn=sample_padding_fn,
        lr_scheduler_or_optimizer=engine.lr_scheduler or engine.optimizer,
        required_microbatches_of_same_size=is_pipeline,
        required_microbatches_of_same_seqlen=is_pipeline,
        seed=data.seed,
    )


def _lengths(
    dataset: Any, engine: Any, folder: str, collate_fn: Collate | None, measure: Callable[[Any], Any] | None
) -> list[int]:
    """Return the lengths from the files of an analyzer, which are written if they do not exist.  A collective."""
    stem = Path(folder) / "seqlen" / "seqlen_sample_to_metric"
    if not MMapIndexedDataset.exists(str(stem)):
        if measure is None:
            raise ValueError(
                f"{stem}.idx does not exist: pass dataset_seqlens=, or batch_seqlens_fn= to measure the lengths"
            )
        DistributedDataAnalyzer(
            dataset=dataset,
            metric_functions=[measure],
            collate_fn=collate_fn,
            batch_size=1024,
            num_workers=get_world_size(),
            worker_id=get_rank(),
            save_path=folder,
            metric_types=["single_value_per_sample"],
            metric_names=["seqlen"],
        ).run_map_reduce()
    lengths = MMapIndexedDataset(str(stem))
    if len(lengths) != len(dataset):
        raise ValueError(
            f"{stem}.idx has {len(lengths)} lengths and the dataset {len(dataset)} samples: delete {folder}, which "
            "belongs to another dataset"
        )
    return [int(np.asarray(length)[0]) for length in lengths[:]]
