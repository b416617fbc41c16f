"""`deepspeed.runtime.comm.hccl`: the compressed all-reduce under that name; ranks communicate as the run does."""

from __future__ import annotations

from zengine.deepspeed.runtime.comm.compressed import CompressedBackend

__all__ = ["HcclBackend"]


class HcclBackend(CompressedBackend):
    """CompressedBackend."""
