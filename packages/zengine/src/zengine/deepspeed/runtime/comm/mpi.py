"""`deepspeed.runtime.comm.mpi`: the compressed all-reduce under MPI's name; ranks communicate as the run does."""

from __future__ import annotations

from typing import Any

from zengine.deepspeed.runtime.comm.compressed import CompressedBackend

__all__ = ["MpiBackend"]


class MpiBackend(CompressedBackend):
    """CompressedBackend; `cuda_aware` has no effect."""

    def __init__(self, cuda_aware: bool = False, mpu: Any = None) -> None:
        super().__init__(mpu)
        self.cuda_aware = cuda_aware
