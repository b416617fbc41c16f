"""`deepspeed.runtime.checkpoint_engine.checkpoint_engine`."""

from __future__ import annotations

import abc
import os
from typing import Any

import attrs

__all__ = ["CheckpointCommitInfo", "CheckpointEngine"]


@attrs.define
class CheckpointCommitInfo:
    """The checkpoint that is being saved."""

    tag: str
    save_dir: str
    save_latest: bool


class CheckpointEngine(abc.ABC):
    """Writer and reader of single files.  The engine's own checkpoints do not use one."""

    def __init__(self, config_params: Any = None) -> None:
        self.name: str | None = None
        self._commit_info: CheckpointCommitInfo | None = None

    @abc.abstractmethod
    def create(self, info: CheckpointCommitInfo) -> None:
        """Begin a checkpoint."""

    @abc.abstractmethod
    def save(self, state_dict: Any, path: str) -> None:
        """Write one file."""

    @abc.abstractmethod
    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of one file."""

    @abc.abstractmethod
    def commit(self, info: CheckpointCommitInfo) -> bool:
        """End a checkpoint."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        os.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        """Return True for the replica that writes model states."""
        return dp_rank == 0

    def is_decoupled(self) -> bool:
        """Return True if files are written in the background."""
        return False

    def set_commit_info(self, info: CheckpointCommitInfo) -> None:
        """Note the checkpoint that is written, for a background writer."""
        self._commit_info = info

    def get_commit_info(self) -> CheckpointCommitInfo | None:
        """Return the last one noted."""
        return self._commit_info

    def cleanup(self) -> None:
        """Forget it."""
        self._commit_info = None

    def preserves_storage_sharing(self) -> bool:
        """Return True if whole storages of tensors are written."""
        return True
