"""Tools for testing code built on checkpoints: ranks as threads, a disk that fails, a disk that loses power.

    storage = ModelStorage()
    zckpt.save("/root", "a", shards=..., objects={}, storage=storage)
    for at in range(len(storage.journal) + 1):
        for survival in SURVIVALS:
            after = storage.crash(at, survival)      # the disk after a restart

`ModelBucket` is the same for object stores: `save(..., storage=bucket.storage())`, then `bucket.crash(at, torn)`.

These tools are tested and typed themselves.
"""

from zckpt.testing.bucket import ModelBucket, Put, Torn, fail_put
from zckpt.testing.faults import FaultyStorage, fail_at
from zckpt.testing.model import SURVIVALS, Kept, ModelStorage, Op, Survival
from zckpt.testing.threads import Outcome, run_threads

__all__ = [
    "SURVIVALS",
    "FaultyStorage",
    "Kept",
    "ModelBucket",
    "ModelStorage",
    "Op",
    "Outcome",
    "Put",
    "Survival",
    "Torn",
    "fail_at",
    "fail_put",
    "run_threads",
]
