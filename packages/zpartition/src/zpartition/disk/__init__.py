"""The disk tier: bytes that do not fit into memory, in a folder, with commits that no crash can halve.

It knows flat CPU tensors and files, nothing of partitions: `DiskStore` and what goes with it.
"""

from __future__ import annotations

from .errors import DiskBusy, DiskClosed, DiskCorrupt, DiskError, DiskExists, DiskFailed, DiskFull, DiskMissing
from .options import Direct, DiskOptions
from .region import Region
from .store import DiskStore
from .transfer import Transfer

__all__ = [
    "Direct",
    "DiskBusy",
    "DiskClosed",
    "DiskCorrupt",
    "DiskError",
    "DiskExists",
    "DiskFailed",
    "DiskFull",
    "DiskMissing",
    "DiskOptions",
    "DiskStore",
    "Region",
    "Transfer",
]
