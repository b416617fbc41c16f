"""Durable, verified, reshardable checkpoints for PyTorch, without pickle.

A checkpoint is a folder of safetensors files and one manifest.  Tensors go in as shards with a global address (name,
shape, box, span) and come out at any other address, so no run is bound to the world size that saved it.  It becomes
visible by one rename after everything is durable: a crash leaves the previous checkpoint or the new one.  Every byte
has a checksum, and loading executes nothing.

Saving: saving.py is the outline, planning.py decides, commit.py argues durability.  Loading: finding.py chooses,
reading.py checks, regions.py computes, fetching.py and transfer.py copy.  views.py is a model and an optimizer as
tensors, background.py saves behind the loop's back.  FORMAT.md is the specification of what is on disk.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .views import Views, views  # not later: the submodule would take the function's name

if TYPE_CHECKING:
    from . import rng
    from .background import AsyncSaver, Busy, SaveHandle, save_async
    from .checkpoint import Checkpoint
    from .errors import (
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
    from .finding import Seen, committed, find
    from .groups import group_peers
    from .leasing import Leasing
    from .loading import Loaded, load
    from .locating import remote
    from .memory import MemoryCheckpoint
    from .nodes import Node
    from .opening import open_checkpoint
    from .peers import ALONE, Peers
    from .pruning import Pruned, prune
    from .reading import LoadReport, Reading
    from .retention import EVERYTHING, Best, Candidate, Keep, Retention
    from .saving import save
    from .shard import Shard, ShardLike, whole
    from .storage import LOCAL, LocalStorage, Storage
    from .views import Views, views

__version__ = "0.1.0"

__all__ = [
    "ALONE",
    "EVERYTHING",
    "LOCAL",
    "AsyncSaver",
    "Best",
    "Busy",
    "Candidate",
    "Checkpoint",
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointExists",
    "CheckpointInputError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "CheckpointReadError",
    "CheckpointStateError",
    "CheckpointWarning",
    "CheckpointWriteError",
    "Keep",
    "Leasing",
    "LoadReport",
    "Loaded",
    "LocalStorage",
    "MemoryCheckpoint",
    "Node",
    "Peers",
    "Pruned",
    "Reading",
    "Retention",
    "SaveHandle",
    "Seen",
    "Shard",
    "ShardLike",
    "Storage",
    "Views",
    "__version__",
    "committed",
    "find",
    "group_peers",
    "load",
    "open_checkpoint",
    "prune",
    "remote",
    "rng",
    "save",
    "save_async",
    "views",
    "whole",
]

# Where the names are, by module: a program that has nothing to save imports next to nothing.
_HOMES = {
    "background": "AsyncSaver Busy SaveHandle save_async",
    "checkpoint": "Checkpoint",
    "errors": "CheckpointCorrupt CheckpointError CheckpointExists CheckpointInputError CheckpointMismatch "
    "CheckpointNotFound CheckpointReadError CheckpointStateError CheckpointWarning CheckpointWriteError",
    "finding": "Seen committed find",
    "groups": "group_peers",
    "leasing": "Leasing",
    "loading": "Loaded load",
    "locating": "remote",
    "memory": "MemoryCheckpoint",
    "nodes": "Node",
    "opening": "open_checkpoint",
    "peers": "ALONE Peers",
    "pruning": "Pruned prune",
    "reading": "LoadReport Reading",
    "retention": "EVERYTHING Best Candidate Keep Retention",
    "saving": "save",
    "shard": "Shard ShardLike whole",
    "storage": "LOCAL LocalStorage Storage",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "rng":
        return importlib.import_module(".rng", __name__)
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f".{_HOME_OF[name]}", __name__), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
