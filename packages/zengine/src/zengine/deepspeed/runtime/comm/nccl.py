"""`deepspeed.runtime.comm.nccl`: the compressed all-reduce under that name; ranks communicate as the run does."""

from __future__ import annotations

from zengine.deepspeed.runtime.comm.compressed import CompressedBackend

__all__ = ["NcclBackend"]


class NcclBackend(CompressedBackend):
    """CompressedBackend."""
