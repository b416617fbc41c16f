"""`deepspeed.runtime.comm.compressed`: the mean of one tensor in one bit an element, with errors of the caller's.

zcomm.CompressedAllReduce has the law, sends many tensors at once and keeps errors itself; optimizers use that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import zcomm

__all__ = ["CompressedBackend"]


class CompressedBackend:
    """Compressed all-reduce over the data-parallel ranks."""

    def __init__(self, mpu: Any = None) -> None:
        """Communicate over all ranks, or over `mpu.get_data_parallel_group()`."""
        self.world_group = None if mpu is None else mpu.get_data_parallel_group()
        self.rank = zcomm.group_rank(self.world_group)
        self.size = zcomm.group_size(self.world_group)
        self._reductions: dict[tuple[int, torch.device], zcomm.CompressedAllReduce] = {}

    @torch.no_grad()
    def compressed_allreduce(
        self, buffer_m: Tensor, worker_error: Tensor, server_error: Tensor, local_rank: int = 0
    ) -> Tensor:
        """Replace `buffer_m` by the compressed mean over ranks, update both errors in place; return `buffer_m`.

        buffer_m: of any shape and floating-point dtype.  worker_error: (W,) float32, W at least its elements and a
        multiple of 8 x ranks; elements beyond those of `buffer_m` count in scales, as in DeepSpeed.  server_error:
        (W / ranks,) float32.  local_rank: without effect; tensors say their device.  A collective; one rank alone
        changes nothing.

        Raises:
            ValueError: the errors do not fit.
        """
        whole, numel = worker_error.numel(), buffer_m.numel()
        if whole < numel or whole % (8 * self.size) or server_error.numel() * self.size != whole:
            wanted = -(-max(numel, 1) // (8 * self.size)) * 8 * self.size
            raise ValueError(
                f"compressed_allreduce: {numel} elements over {self.size} ranks with errors of {whole} (worker) and "
                f"{server_error.numel()} (server) elements; allocate {wanted} and {wanted // self.size}."
            )
        if self.size == 1:
            return buffer_m
        reduction = self._reduction(whole, buffer_m.device)
        reduction.worker_error.copy_(worker_error.view(-1))
        reduction.server_error.copy_(server_error.view(-1))
        values = torch.zeros(whole, device=buffer_m.device)
        values[:numel] = buffer_m.reshape(-1)
        reduction.mean([values])
        worker_error.view(-1).copy_(reduction.worker_error)
        server_error.view(-1).copy_(reduction.server_error)
        return buffer_m.copy_(values[:numel].view(buffer_m.shape))

    def _reduction(self, whole: int, device: torch.device) -> zcomm.CompressedAllReduce:
        """Return the reduction of tensors of that length, whose errors are overwritten in each call."""
        key = (whole, device)
        if key not in self._reductions:
            layout = zcomm.SignLayout.by_tensor([whole], self.size, padded=True)
            self._reductions[key] = zcomm.CompressedAllReduce(layout, self.world_group, device=device)
        return self._reductions[key]
