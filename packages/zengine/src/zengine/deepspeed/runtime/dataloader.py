"""`deepspeed.runtime.dataloader`: the repeating loader, and a loader for custom loops.

An engine's own loader (`training_data=`) is one of `zengine.data`, which resumes at the exact sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from zengine.data import RepeatingLoader
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.comm.world import get_rank, get_world_size
from zengine.deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler

__all__ = ["DeepSpeedDataLoader", "RepeatingLoader"]


class DeepSpeedDataLoader:
    """Batches of a dataset for one data-parallel rank; each `iter` starts the same order again."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Any = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, Any] | None = None,
    ) -> None:
        """Split `dataset` over the data-parallel ranks, unless `data_sampler` yields this rank's samples.

        local_rank: -1 means one process for all devices of the host, which reads all samples in random order:
            `batch_size` is for one device, and batches have as many samples for each.
        tput_timer: an object whose `start()` is called before each batch, or None.
        num_local_io_workers: processes that read; by default 2 for each device, as in DeepSpeed.
        deepspeed_dataloader_config: with a true "curriculum_learning" the samples are those of a
            DeepSpeedDataSampler with the section "data_efficiency".
        """
        config = dict(deepspeed_dataloader_config or {})
        self.deepspeed_dataloader_config = config
        self.curriculum_learning_enabled = bool(config.get("curriculum_learning"))
        size = get_world_size() if data_parallel_world_size is None else data_parallel_world_size
        rank = get_rank() if data_parallel_rank is None else data_parallel_rank
        is_for_all = local_rank < 0 or self.curriculum_learning_enabled
        self.device_count = get_accelerator().device_count() if is_for_all else 1
        if self.curriculum_learning_enabled:
            data_sampler = DeepSpeedDataSampler(
                config["data_efficiency"],
                len(dataset),
                batch_size,
                rank,
                size,
                config["data_parallel_group"],
                config["gradient_accumulation_steps"],
                config["global_rank"],
                drop_last=dataloader_drop_last,
            )
            num_local_io_workers = config["num_workers"]
        else:
            batch_size *= self.device_count
        if data_sampler is None:
            data_sampler = DistributedSampler(dataset, size, rank) if local_rank >= 0 else RandomSampler(dataset)
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.pin_memory, self.tput_timer, self.data_sampler = pin_memory, tput_timer, data_sampler
        self.num_local_io_workers = 2 * self.device_count if num_local_io_workers is None else num_local_io_workers
        self.dataloader_drop_last = dataloader_drop_last
        self.post_process_func: Callable[[Any, Any], Any] | None = None  # (batch, state of the sampler) -> batch
        self.data: Iterator[Any] | None = None

    @property
    def len(self) -> int:
        """Batches of an epoch."""
        samples = len(self.data_sampler)
        return samples // self.batch_size if self.dataloader_drop_last else math.ceil(samples / self.batch_size)

    def __len__(self) -> int:
        return self.len

    def __iter__(self) -> DeepSpeedDataLoader:
        """Start from the first batch."""
        options: dict[str, Any] = {
            "pin_memory": self.pin_memory,
            "num_workers": self.num_local_io_workers,
            "collate_fn": self.collate_fn,
        }
        if self.curriculum_learning_enabled:
            options["batch_sampler"] = self.data_sampler
        else:
            options |= {"batch_size": self.batch_size, "sampler": self.data_sampler}
            options["drop_last"] = self.dataloader_drop_last
        self.dataloader: DataLoader[Any] = DataLoader(self.dataset, **options)
        self.data = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        """Return the next batch; before the first `iter` this raises TypeError, as for any iterable."""
        if self.data is None:
            raise TypeError("call iter() on this DeepSpeedDataLoader before next().")
        if self.tput_timer:
            self.tput_timer.start()
        batch = next(self.data)
        if self.curriculum_learning_enabled and self.post_process_func is not None:
            batch = self.post_process_func(batch, self.data_sampler.state_dict())
        return batch
