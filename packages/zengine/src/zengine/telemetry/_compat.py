"""The one file that calls torch's private API; `tests/test_compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["begin_memory_history", "end_memory_history"]

MAX_ENTRIES = 200_000  # allocations and frees that are kept, the newest


def begin_memory_history() -> bool:
    """Let CUDA's allocator remember what it does, with the Python stacks; False where this torch cannot."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return False
    record(max_entries=MAX_ENTRIES)
    return True


def end_memory_history(path: Path) -> bool:
    """Write what was remembered to `path` and stop; False where this torch cannot."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if dump is None or record is None:
        return False
    try:
        dump(str(path))
    finally:
        record(enabled=None)
    return True
