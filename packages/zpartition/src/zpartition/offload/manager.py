"""Offload manager: the placements of one partition's buckets, and the step that visits them.

The optimizer updates a group of buckets in one call of its `step`: it skips parameters without a gradient, so in each
call only the masters of one group have gradients.  While the weights of one group are copied to the device, the next
group is updated.  Without offload there is one group, and this module has no effect.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from typing import TypeVar, final

import attrs
import torch
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

import zcomm
from zpartition.disk import DiskError, DiskOptions, DiskStore
from zpartition.gradients.reducer import GradientReducer
from zpartition.layout.layout import Layout
from zpartition.layout.policy import Offload, Tier, step_groups
from zpartition.memory.mover import Mover, make_mover
from zpartition.memory.placement import (
    ON_DEVICE,
    DiskParams,
    HostParams,
    HostPlacement,
    MasterPlacement,
    StagingBuffers,
)
from zpartition.offload.disk_states import DiskPlacement, StateStore
from zpartition.offload.disk_step import DiskStep, hook_dicts
from zpartition.weights.sharded import ShardedStorage
from zpartition.weights.storage import BucketStorage

__all__ = ["OffloadManager", "open_store"]

Storage = TypeVar("Storage", BucketStorage, ShardedStorage, BucketStorage | ShardedStorage)
Storages = Sequence[BucketStorage | ShardedStorage]
Group = tuple[int, ...]  # bucket indices of one step call


@final
@attrs.define(eq=False)
class OffloadManager:
    """Placements of each bucket's master, states and reduced gradient."""

    offload: Offload
    mover: Mover
    group: ProcessGroup | None
    placements: tuple[MasterPlacement, ...]  # by bucket index
    groups: tuple[Group, ...]  # in the order of a step
    numels: tuple[int, ...] = ()  # of the spans, by bucket index
    disks: tuple[StateStore, ...] = ()  # one, if any states are on disk
    param_stores: tuple[DiskStore, ...] = ()  # one, if any weights are on disk
    host_weight_numel: int = 0  # of the weights that stay on the host although others are on disk
    staging: StagingBuffers = attrs.field(
        default=attrs.Factory(lambda self: StagingBuffers(self.offload.weight_staging_numel), takes_self=True)
    )  # of weights on disk
    hooks: tuple[RemovableHandle, ...] = ()  # of the optimizer's state dicts

    @classmethod
    def create(
        cls, layout: Layout, offload: Offload, device: torch.device, group: ProcessGroup | None
    ) -> OffloadManager:
        """Create placements for the buckets of `layout`; allocates nothing but a folder."""
        made = cls(offload, make_mover(device, offload), group, (), ())
        made.extend(layout)
        return made

    def extend(self, added: Layout) -> None:
        """Append placements for more buckets; `ratio` of these leaves the device, too."""
        tiers = self.offload.place([bucket.span_numel for bucket in added.buckets])
        if Tier.DISK in tiers and not self.disks:
            self.disks = (StateStore(open_store(self.offload, self.group), self.mover),)
        for bucket, tier in zip(added.buckets, tiers):
            self.numels = (*self.numels, bucket.span_numel)
            if tier is Tier.DISK:
                self.placements = (*self.placements, DiskPlacement(self.disks[0], bucket.index))
            else:
                self.placements = (*self.placements, ON_DEVICE if tier is Tier.DEVICE else HostPlacement(self.mover))
        self.groups = step_groups(
            [placement.tier for placement in self.placements], self.numels, self.offload.step_numel
        )

    def adopt(self, storage: Storage) -> Storage:
        """Move the master of a new storage to its placement; it is valid after `refresh_master`."""
        storage.placement = self.placements[storage.bucket.index]
        storage.placement.adopt(storage.master)
        return self.place_params(storage)

    def place_params(self, storage: Storage) -> Storage:
        """Move the weights of a unit to their tier; frozen ones, without separate masters, never to disk."""
        if not isinstance(storage, ShardedStorage) or self.offload.weights is Tier.DEVICE:
            return storage
        if self.offload.weights is Tier.DISK and storage.is_trained:
            numel = storage.bucket.span_numel
            if not self.offload.keeps_on_host(self.host_weight_numel, numel):
                self.param_stores = self.param_stores or (open_store(self.offload, self.group),)
                store = self.param_stores[0]
                storage.param_placement = DiskParams.of(storage.own_span, self.mover, store, self.staging)
                return storage
            self.host_weight_numel += numel
        storage.param_placement = param_placement = HostParams.of(storage.own_span, self.mover)
        if not storage.is_trained:
            storage.master.data = param_placement.host
        return storage

    def attach(self, reducer: GradientReducer) -> None:
        """Move gradients to the host as soon as they are reduced, if the states are not on the device."""
        for gradient, placement in zip(reducer.gradients, self.placements):
            gradient.mover = None if placement.tier is Tier.DEVICE else self.mover

    def step_all_at_once(self) -> None:
        """Put all buckets into one group, for an optimizer that needs whole tensors in each step."""
        self.groups = (tuple(range(len(self.placements))),) if self.placements else ()

    def held_bytes(self) -> dict[str, int]:
        """Return the bytes of staging buffers and of files, by owner."""
        place = "pinned" if self.offload.pin else "host"
        found = {"staging": self.mover.in_flight_bytes, f"{place} staging": self.mover.staging_bytes}
        for disk in self.disks:
            found["host step buffers"] = disk.made_bytes
            found.update({"disk masters": disk.region_bytes["master"], "disk states": disk.region_bytes["states"]})
        return found

    def hook(self, optimizer: torch.optim.Optimizer, storages: Storages) -> None:
        """Let state dicts of `optimizer` include states on disk."""
        for hook in self.hooks:
            hook.remove()
        places = [
            (storage.placement, storage.master)
            for storage in storages
            if isinstance(storage.placement, DiskPlacement)
        ]
        if places:
            self.hooks = tuple(hook_dicts(optimizer, places))

    def close(self) -> None:
        """Remove the files."""
        for hook in self.hooks:
            hook.remove()
        with contextlib.ExitStack() as stack:  # if one fails, the others are closed all the same
            for store in (*(disk.store for disk in self.disks), *self.param_stores):
                stack.callback(store.close, remove=True)

    # -- a step ------------------------------------------------------------------------------------

    @contextmanager
    def update(
        self, storages: Storages, optimizer: torch.optim.Optimizer | None, stepped: Set[int] = frozenset()
    ) -> Iterator[Iterator[Group]]:
        """Wrap a step: yields an iterator of groups; only the masters of the visited group have gradients.

        stepped: buckets that are updated already, and have no gradient.

        If the body raises, files do not change on any rank.
        """
        hides_gradients = len(self.groups) != 1 or bool(stepped) or bool(self.disks)
        masters = [storage.master for storage in storages if hides_gradients]
        gradients = [master.grad for master in masters]
        try:
            if self.disks:
                with self._update_on_disk(storages, optimizer) as groups:
                    yield self._visit(groups, masters, stepped)
            else:
                yield self._visit(iter(self.groups), masters, stepped)
        finally:
            for master, gradient in zip(masters, gradients):
                master.grad = gradient
            self.mover.wait_device()  # also for weights that were sent before the body failed

    def _visit(self, groups: Iterator[Group], masters: Sequence[Parameter], stepped: Set[int]) -> Iterator[Group]:
        """Yield the groups; while one is visited, the masters of the others have no gradient."""
        if len(self.groups) == 1 and not stepped:
            yield from groups
            return
        gradients = [master.grad for master in masters]
        for master in masters:
            master.grad = None
        for group in groups:
            for index in set(group) - stepped:
                masters[index].grad = gradients[index]
            yield group
            for index in group:
                masters[index].grad = None

    @contextmanager
    def _update_on_disk(
        self, storages: Storages, optimizer: torch.optim.Optimizer | None
    ) -> Iterator[Iterator[Group]]:
        """Visit buckets on disk, commit them on all ranks, then visit buckets on the device."""
        placements = {
            index: placement
            for index, placement in enumerate(self.placements)
            if isinstance(placement, DiskPlacement)
        }
        masters = [storage.master for storage in storages]
        step = DiskStep(self.disks[0], placements, masters, optimizer, self.offload.buffer_count)
        on_device = [group for group in self.groups if group[0] not in placements]
        committed: list[bool] = []

        def walk() -> Iterator[Group]:
            yield from step.visit([group for group in self.groups if group[0] in placements])
            committed.append(True)
            self._commit_or_undo(step, storages, None)
            yield from on_device

        try:
            yield walk()
        except Exception as problem:
            if not committed:
                self._commit_or_undo(step, storages, problem)
            raise
        except BaseException:
            if not committed:
                step.undo()  # without a vote: the run ends
                _publish_undone(step, storages)
            raise

    def _commit_or_undo(self, step: DiskStep, storages: Storages, problem: Exception | None) -> None:
        """Commit on all ranks, or on none; then the weights are restored, too."""
        try:
            step.commit_or_undo(problem, self.group)
        except Exception:
            _publish_undone(step, storages)
            raise


def _publish_undone(step: DiskStep, storages: Storages) -> None:
    """Publish the masters again after an undone step."""
    for index in step.before:
        storages[index].publish()


def open_store(offload: Offload, group: ProcessGroup | None) -> DiskStore:
    """Create a store in a new folder of this rank, which is removed with the store.

    Removes the folders of this rank that killed runs have left; those of open stores are locked, and stay.
    """
    os.makedirs(offload.directory, exist_ok=True)
    prefix = f"rank{zcomm.group_rank(group)}-"
    for left in [name for name in os.listdir(offload.directory) if name.startswith(prefix)]:
        with contextlib.suppress(DiskError):
            DiskStore.remove(os.path.join(offload.directory, left))
    folder = tempfile.mkdtemp(prefix=prefix, dir=offload.directory)
    try:
        options = DiskOptions(num_threads=offload.num_calls, chunk_bytes=offload.call_bytes, durable=False)
        store = DiskStore.create(folder, options)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(store, _remove, folder, os.getpid())
    return store


def _remove(folder: str, owner_pid: int) -> None:
    """Remove the folder, unless this process is a fork of its owner."""
    if os.getpid() == owner_pid:
        shutil.rmtree(folder, ignore_errors=True)
