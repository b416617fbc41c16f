"""Phases of a compressed all-reduce by the compiled extension (csrc/zs_signs.c), on a CPU.

An encoding is one pass over memory: it reads the input and what was encoded last, and writes what is encoded now and
its bits.  The error follows from the last scale, so between calls `worker` and `server` hold what was encoded;
`settle` makes them the errors, for checkpoints.

Work is cut into runs of at most `_RUN_NUMEL` elements, which the threads of torch's OpenMP pool share.

Rejected: the error written at once (its scale is known after a pass over the tensor, so it takes a second one).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from zcomm.collectives.sign_codes import ROW
from zcomm.collectives.sign_layout import Piece, SignLayout
from zcomm.collectives.sign_phases import SignPhases, TorchPhases, with_zero
from zcomm.shared import native

__all__ = ["KernelPhases", "phases_for"]

_RUN_NUMEL = 1 << 14
_ENCODE, _AVERAGE, _DECODE, _SETTLE = range(4)  # as numbered by zs_api.h
_ONES = 0xFF  # the code of eight zeros: padding
_PADDING = -1  # in place of a piece
_POINTERS = {  # of zs_signs_job
    "runs": "zs_signs",
    "coded": "float",
    "scales": "float",
    "codes": "uint8_t",
    "squares": "double",
    "received": "uint8_t",
    "source_scales": "float",
}


def phases_for(layout: SignLayout, rank: int, device: torch.device) -> SignPhases:
    """Return the kernel's phases for several CPU ranks if the extension is available, else torch's."""
    if device.type == "cpu" and layout.size > 1 and not native.unavailable_reason():
        return KernelPhases(layout, rank, device)
    return TorchPhases(layout, rank, device)


@final
class KernelPhases(SignPhases):
    """Phases in C.  Buffers of another dtype than float32 are copied."""

    def __init__(self, layout: SignLayout, rank: int, device: torch.device) -> None:
        super().__init__(layout, rank, device)
        library = native.library()
        self._ffi, self._lib = library.ffi, library.lib
        self._lib.zs_set_omp(_omp_address())
        own = list(layout.pieces())
        numbered = list(enumerate(own))
        self._worker_runs = self._runs_of(numbered, 0)
        self._server_runs = self._runs_of([each for each in numbered if each[1].owner == rank], rank)
        gaps = torch.tensor(list(_gaps(layout, own)), dtype=torch.int64).view(-1, 6)
        self._decode_runs = torch.cat([self._worker_runs, gaps])
        # of what was encoded last, by piece
        self._worker_scales = torch.zeros(len(own) + 1)
        self._server_scales = torch.zeros(len(own) + 1)

    def _runs_of(self, pieces: Iterable[tuple[int, Piece]], first: int) -> Tensor:
        """Return the runs of numbered pieces; errors and messages begin with those of rank `first`."""
        found = list[tuple[int, ...]]()
        for index, piece in pieces:
            owner = piece.owner - first
            coded, code = owner * self.layout.span_numel, owner * self.message_bytes + self.header_bytes
            found += _runs(index, piece, coded, code)
        return torch.tensor(found, dtype=torch.int64).view(-1, 6)

    def encode_worker(self, buffers: Sequence[Tensor], messages: Tensor) -> None:
        inputs = [_float32(buffer) for buffer in buffers]
        self._codes_of(messages).fill_(_ONES)
        squares = self._run(
            *(_ENCODE, self._worker_runs, self._worker_scales, inputs), coded=self.worker, codes=messages
        )
        self._worker_scales = with_zero(self.worker_scales(squares))
        for owner, message in enumerate(messages):
            self.write_scales(message, owner, self._worker_scales)

    def encode_server(self, received: Tensor, message: Tensor) -> None:
        size = self.layout.size
        scales = torch.stack([self.scales_of(each, self.rank) for each in received]).div_(size)
        self._codes_of(message).fill_(_ONES)
        squares = self._run(
            *(_AVERAGE, self._server_runs, self._server_scales),
            coded=self.server,
            codes=message,
            received=received,
            source_scales=scales,
            num_sources=size,
            source_bytes=self.message_bytes,
            num_scales=scales.shape[1],
        )
        self._server_scales = with_zero(self.server_scales(squares[self.tables.of_owner[self.rank]]))
        self.write_scales(message, self.rank, self._server_scales)

    def decode(self, gathered: Tensor, buffers: Sequence[Tensor]) -> None:
        scales = torch.stack([self.scales_of(each, owner) for owner, each in enumerate(gathered)]).sum(0)
        outputs = [_float32(buffer) for buffer in buffers]
        self._run(_DECODE, self._decode_runs, scales, outputs, codes=gathered)
        for buffer, output in zip(buffers, outputs):
            if output is not buffer:
                buffer.copy_(output)

    def settle(self) -> None:
        self._run(_SETTLE, self._worker_runs, self._worker_scales, coded=self.worker)
        self._run(_SETTLE, self._server_runs, self._server_scales, coded=self.server)
        self._worker_scales.zero_()
        self._server_scales.zero_()

    def _run(
        self, phase: int, runs: Tensor, scales: Tensor, buffers: Sequence[Tensor] = (), **fields: Tensor | int
    ) -> Tensor:
        """Run a phase; return sums of squares by piece, float64, which mean something after an encoding.

        fields: others of `zs_signs_job`.
        """
        ffi, squares = self._ffi, torch.zeros(len(runs), dtype=torch.float64)
        places = ffi.new("float *[]", [ffi.cast("float *", buffer.data_ptr()) for buffer in buffers] or 1)
        job = ffi.new("zs_signs_job *", {"num_runs": len(runs), "buffers": places})
        for name, value in {**fields, "runs": runs, "scales": scales, "squares": squares}.items():
            if isinstance(value, Tensor):
                setattr(job, name, ffi.cast(f"{_POINTERS[name]} *", value.data_ptr()))
            else:
                setattr(job, name, value)
        self._lib.zs_signs_run(phase, job, torch.get_num_threads())
        total = torch.zeros(len(self.tables.views), dtype=torch.float64)
        return total if phase == _DECODE else total.index_add_(0, runs[:, 2], squares)


def _runs(index: int, piece: Piece, coded: int, code: int) -> Iterator[tuple[int, ...]]:
    """Yield the runs of a piece, as csrc/zs_api.h has them; coded, code: where those of its owner begin."""
    numel = piece.hi - piece.lo
    for start in range(0, numel, _RUN_NUMEL):
        at = piece.lo + start
        yield piece.buffer, piece.begin + start, index, coded + at, code + at // ROW, min(_RUN_NUMEL, numel - start)


def _gaps(layout: SignLayout, pieces: Sequence[Piece]) -> Iterator[tuple[int, ...]]:
    """Yield the runs of padding in buffers."""
    ends = [0] * len(layout.buffers)
    found = sorted((piece.buffer, piece.begin, piece.begin + piece.hi - piece.lo) for piece in pieces)
    for buffer, begin, end in [*found, *((index, each.numel, 0) for index, each in enumerate(layout.buffers))]:
        if ends[buffer] < begin:
            yield buffer, ends[buffer], _PADDING, 0, 0, begin - ends[buffer]
        ends[buffer] = end


def _float32(buffer: Tensor) -> Tensor:
    return buffer if buffer.dtype is torch.float32 else buffer.float()


@functools.cache
def _omp_address() -> int:
    """Return the address of torch's GOMP_parallel; 0 if its OpenMP runtime is not GNU's."""
    try:
        return ctypes.cast(ctypes.CDLL(None).GOMP_parallel, ctypes.c_void_p).value or 0
    except (AttributeError, OSError, TypeError):  # no such function, or no such look-up on this platform
        return 0
