"""Norm and finiteness of gradients on a CUDA device, without synchronization."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from zoptim.backends.contract import FORMAT_OF_DTYPE
from zoptim.backends.gpu.launch import Call, CupyLauncher, Launcher
from zoptim.backends.gpu.source import COMMON
from zoptim.backends.gpu.tables import Table, make_items
from zoptim.backends.memory import addresses, as_dense

__all__ = ["SquaresJob", "grad_stats"]

_ARGS = struct.Struct("<5Qq")  # zk_squares_args
_GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class SquaresJob:
    """The norm of a list of gradients on one CUDA device, in two launches; squares are summed in double.

    Sizes and dtypes are fixed, addresses may move.  The order of the sum is fixed, so results are deterministic.  It
    can be captured in a CUDA graph like a GpuJob.
    """

    def __init__(self, grads: Sequence[Tensor], launcher: Launcher | None = None) -> None:
        """Allocate tables and buffers for `grads`: float32, bfloat16 or float16 on one device, at least one."""
        self._device = grads[0].device
        self._launcher = launcher or CupyLauncher(self._device)
        self._kernels = self._launcher.load(COMMON)
        numels = [grad.numel() for grad in grads]
        self._items, _ = make_items(numels, COMMON.chunk_numel, self._device)
        self._grads = list(map(as_dense, grads))
        formats = [FORMAT_OF_DTYPE[grad.dtype] for grad in grads]
        self._table = Table.make([addresses(self._grads)], [numels, formats], self._device)
        self._partials = torch.empty(len(self._items), dtype=torch.float64, device=self._device)

    def bind(self, grads: Sequence[Tensor]) -> None:
        """Use other tensors of the same sizes and dtypes."""
        self._grads = list(map(as_dense, grads))
        self._launch([("zk_patch", 1, args) for args in self._table.move([addresses(self._grads)])])

    def measure(self) -> tuple[Tensor, Tensor]:
        """Return (norm () float64; found_inf () float32, 1.0 if an element is not finite, else 0.0)."""
        norm = torch.empty((), dtype=torch.float64, device=self._device)
        found_inf = torch.empty((), dtype=torch.float32, device=self._device)
        tensors = (self._table.words, self._items, self._partials, norm, found_inf)
        args = _ARGS.pack(*(tensor.data_ptr() for tensor in tensors), len(self._items))
        parts = [("zk_squares", len(self._items), args)] if len(self._items) else []
        self._launch([*parts, ("zk_squares_final", 1, args)])
        return norm, found_inf

    def _launch(self, calls: list[tuple[str, int, bytes]]) -> None:
        if calls:
            ready = [Call(self._kernels[name], num_blocks, args) for name, num_blocks, args in calls]
            self._launcher.launch(ready, (self._table.words, self._items, self._partials, *self._grads))


def grad_stats(grads: Sequence[Tensor], launcher: Launcher | None = None) -> tuple[Tensor, Tensor]:
    """Return (norm () float64, found_inf () float32) of gradients on one CUDA device, of any floating dtypes.

    Makes new tables at each call, which a CUDA graph cannot capture; use a SquaresJob there.  Raises ValueError or
    TypeError for no gradients, gradients on several devices, or integers.
    """
    _check(grads)
    read = [grad for grad in grads if grad.dtype in _GRAD_DTYPES]
    others = [grad for grad in grads if grad.dtype not in _GRAD_DTYPES]
    if not others:
        return SquaresJob(read, launcher).measure()
    total = torch.stack([grad.detach().double().square().sum() for grad in others]).sum()
    if read:
        total = total + SquaresJob(read, launcher).measure()[0].square()
    return total.sqrt(), (~torch.isfinite(total)).float()


def _check(grads: Sequence[Tensor]) -> None:
    if not grads:
        raise ValueError("grad_stats was given no gradients; it needs at least one.")
    for position, grad in enumerate(grads):
        if not grad.dtype.is_floating_point:
            raise TypeError(f"gradient {position} is {grad.dtype}; it must be floating.")
        if grad.device != grads[0].device:
            raise ValueError(
                f"gradient {position} is on {grad.device}, gradient 0 on {grads[0].device}; "
                "call grad_stats for each device separately."
            )
