"""`deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine`."""

from __future__ import annotations

import logging
from typing import Any

import torch

from zckpt.interchange import read_torch_file, write_torch_file
from zengine.deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from zengine.deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

__all__ = ["TorchCheckpointEngine"]

log = logging.getLogger("zengine")


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
        return value if device.type == "cpu" else clone_tensors_for_torch_save(value, device)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Return True: each file is complete when `save` returns."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Return False: a tensor is written in a storage of its own size."""
        return False
