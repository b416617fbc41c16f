"""Disk tier: byte regions in a folder on a drive, with atomic commits.

The package knows flat CPU tensors and files, and nothing of partitions.  `DiskStore` is the entry point.
"""

from __future__ import annotations

from zpartition.disk.errors import (
    DiskBusy,
    DiskClosed,
    DiskCorrupt,
    DiskError,
    DiskExists,
    DiskFailed,
    DiskFull,
    DiskMissing,
)
from zpartition.disk.region import Region, Transfer
from zpartition.disk.store import Direct, DiskOptions, DiskStore

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
