"""Single files in torch's format, with the interface of DeepSpeed's checkpoint engines.

The engine's own checkpoints do not use it: it is for code that saves a dict of its own through
`engine.checkpoint_engine`.
"""

from __future__ import annotations

import abc
import logging
import os
from typing import Any

import attrs
import torch

from zckpt.interchange import read_torch_file, write_torch_file
from zengine.data.tree import map_tensors

__all__ = ["CheckpointCommitInfo", "CheckpointEngine", "TorchCheckpointEngine"]

log = logging.getLogger("zengine")


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


class TorchCheckpointEngine(CheckpointEngine):
    """Files in torch's format, of plain values and tensors; nothing is pickled or unpickled."""

    def __init__(self, config_params: Any = None) -> None:
        super().__init__(config_params)
        self.name = "TorchCheckpointEngine"

    def create(self, info: CheckpointCommitInfo) -> None:
        """Log that a checkpoint begins."""
        log.info("[Torch] checkpoint %s is about to be saved", info.tag)

    def save(self, state_dict: Any, path: str) -> None:
        """Write a file that torch.load reads.  Raises TypeError for objects other than plain values and tensors."""
        write_torch_file(path, state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Return the content of a file, on `map_location` (a device; None: the CPU).

        Raises zckpt.CheckpointCorrupt: damaged, or it holds other objects than plain values and tensors.
        """
        value = read_torch_file(path)
        device = torch.device("cpu") if map_location is None else torch.device(map_location)
        return value if device.type == "cpu" else map_tensors(value, lambda tensor: tensor.to(device))

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: each file is complete when `save` returns."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor is written in a storage of its own size."""
        return False
