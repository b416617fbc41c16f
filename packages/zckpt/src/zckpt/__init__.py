"""Durable, verified, reshardable checkpoints for PyTorch, without pickle.

A checkpoint is a folder of safetensors files and a manifest.  Tensors are saved as shards with a global address
(name, shape, box, span) and loaded at any other address, so a checkpoint is not bound to the world size that saved
it.  It becomes visible by one rename after all data is durable: a crash leaves the previous checkpoint or the new
one.  Every byte has a checksum, and loading executes no code.

Folders, low first: format (pure values; FORMAT.md specifies the bytes), ranks (peers and votes), storage (local disk
and object stores), sources (modules, optimizers, random state), loading, saving, containers (file formats of
others), interchange (their checkpoints), cli.
Saving: save.py is the outline, plan.py assigns shards to files, commit.py describes the commit protocol.
Loading: select.py selects a checkpoint, plan_reads.py checks it against the request, run_reads.py and copy.py fill
the tensors.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zckpt.containers.gguf import GGUFFile, read_gguf
    from zckpt.errors import (
        CheckpointCorrupt,
        CheckpointError,
        CheckpointExists,
        CheckpointInputError,
        CheckpointMismatch,
        CheckpointNotFound,
        CheckpointReadError,
        CheckpointStateError,
        CheckpointWarning,
        CheckpointWriteError,
    )
    from zckpt.format.nodes import Node
    from zckpt.format.shard import Shard, ShardLike, whole
    from zckpt.gc_pause import collector_paused
    from zckpt.loading.checkpoint import Checkpoint, open_checkpoint
    from zckpt.loading.load import Loaded, load
    from zckpt.loading.memory import MemoryCheckpoint
    from zckpt.loading.plan_reads import LoadReport, ReadRequest
    from zckpt.loading.select import CheckpointInfo, find, list_checkpoints
    from zckpt.ranks import ALONE, Peers, group_peers
    from zckpt.saving.background import AsyncSaver, SaveHandle, WhenBusy, save_async
    from zckpt.saving.prune import PruneReport, prune
    from zckpt.saving.retention import KEEP_ALL, Best, Candidate, Retention, RetentionPolicy
    from zckpt.saving.save import save
    from zckpt.sources import rng
    from zckpt.sources.views import Views, views
    from zckpt.storage.locate import remote
    from zckpt.storage.lock import LockPolicy
    from zckpt.storage.storage import LOCAL, LocalStorage, Storage

__version__ = "0.3.0"

__all__ = [
    "ALONE",
    "KEEP_ALL",
    "LOCAL",
    "AsyncSaver",
    "Best",
    "Candidate",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointInfo",
    "CheckpointInputError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointReadError",
    "CheckpointStateError",
    "CheckpointWarning",
    "CheckpointWriteError",
    "GGUFFile",
    "LoadReport",
    "Loaded",
    "LocalStorage",
    "LockPolicy",
    "MemoryCheckpoint",
    "Node",
    "Peers",
    "PruneReport",
    "ReadRequest",
    "Retention",
    "RetentionPolicy",
    "SaveHandle",
    "Shard",
    "ShardLike",
    "Storage",
    "Views",
    "WhenBusy",
    "__version__",
    "collector_paused",
    "find",
    "group_peers",
    "list_checkpoints",
    "load",
    "open_checkpoint",
    "prune",
    "read_gguf",
    "remote",
    "rng",
    "save",
    "save_async",
    "views",
    "whole",
]

# Module -> public names in it.  They are imported on first use, so that `import zckpt` does not import torch.
_EXPORTS = {
    "containers.gguf": "GGUFFile read_gguf",
    "gc_pause": "collector_paused",
    "errors": "CheckpointCorrupt CheckpointError CheckpointExists CheckpointInputError CheckpointMismatch "
    "CheckpointNotFound CheckpointReadError CheckpointStateError CheckpointWarning CheckpointWriteError",
    "format.nodes": "Node",
    "format.shard": "Shard ShardLike whole",
    "ranks": "ALONE Peers group_peers",
    "storage.locate": "remote",
    "storage.lock": "LockPolicy",
    "storage.storage": "LOCAL LocalStorage Storage",
    "sources": "rng",
    "sources.views": "Views views",
    "loading.checkpoint": "Checkpoint open_checkpoint",
    "loading.load": "Loaded load",
    "loading.memory": "MemoryCheckpoint",
    "loading.plan_reads": "LoadReport ReadRequest",
    "loading.select": "CheckpointInfo find list_checkpoints",
    "saving.background": "AsyncSaver SaveHandle WhenBusy save_async",
    "saving.prune": "PruneReport prune",
    "saving.retention": "KEEP_ALL Best Candidate Retention RetentionPolicy",
    "saving.save": "save",
}
_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}

# Names of 0.1 -> their names since 0.3, for one minor version.
RENAMED = {
    "Busy": "WhenBusy",
    "EVERYTHING": "KEEP_ALL",
    "Keep": "RetentionPolicy",
    "Leasing": "LockPolicy",
    "Pruned": "PruneReport",
    "Reading": "ReadRequest",
    "Seen": "CheckpointInfo",
    "committed": "list_checkpoints",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name in RENAMED:
        is_import = sys._getframe(1).f_code.co_name == "_handle_fromlist"  # of `from ... import name`
        error = ImportError if is_import else AttributeError
        raise error(f"{__name__}.{name} was renamed in 0.3.0; use {__name__}.{RENAMED[name]}.")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "rng":
        return importlib.import_module("zckpt.sources.rng")
    found = getattr(importlib.import_module(f"zckpt.{_MODULE_OF[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
