"""Tools to test what is built on checkpoints: ranks as threads, a disk that fails, a disk that loses power.

    storage = ModelStorage()
    zckpt.save("/root", "a", shards=..., objects={}, storage=storage)
    for at in range(len(storage.journal) + 1):
        for survival in SURVIVALS:
            after = storage.crash(at, survival)      # what a machine would find when it comes back

Tested itself, typed, and safe to import in production code, which has no use for it.
"""

from .faults import FaultyStorage, fail_at
from .model import SURVIVALS, Kept, ModelStorage, Op, Survival
from .threads import Outcome, run_threads

__all__ = [
    "SURVIVALS",
    "FaultyStorage",
    "Kept",
    "ModelStorage",
    "Op",
    "Outcome",
    "Survival",
    "fail_at",
    "run_threads",
]
