"""The floor of a step: the time to move its bytes.

On a CPU: a C loop over the streams of the case (`floors.c`), compiled for this processor when the benchmark runs and
executed by torch's threads.  On a GPU: a device-to-device copy of as many bytes, the usual measure of bandwidth.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from contenders import Step, Unavailable
from torch import Tensor

__all__ = ["FLAGS", "LOOPS", "compiler", "copy_floor", "cpu_floor"]

SOURCE = Path(__file__).with_name("floors.c")
FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
LOOPS = (
    "adam", "one_state", "offload", "boundary", "split", "states_16", "states_8", "lamb", "clip", "norm",
)  # as in floors.c # fmt: skip
OMP_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
COPY_BYTES = 2**30  # most bytes of one copy on the GPU

_loaded: list[ctypes.CDLL] = []  # none or one


class _Job(ctypes.Structure):
    """floor_job."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("numel", ctypes.c_void_p),
        ("streams", ctypes.c_void_p),
        ("mask", ctypes.c_uint32),
    )


@attrs.define(eq=False)
class _Floor:
    """A job with the arrays that it points to."""

    library: ctypes.CDLL
    loop: int  # index in LOOPS
    tensors: Sequence[Sequence[Tensor]]  # streams in the order of the loop; kept alive
    arrays: list[Any] = attrs.field(factory=list)
    job: _Job = attrs.field(factory=_Job)

    def fill(self) -> None:
        """Fill in the job."""
        num_rows = len(self.tensors[0])
        numel = (ctypes.c_int64 * num_rows)(*(t.numel() for t in self.tensors[0]))
        rows = [(ctypes.c_void_p * num_rows)(*(t.data_ptr() for t in stream)) for stream in self.tensors]
        streams = (ctypes.c_void_p * len(rows))(*map(ctypes.addressof, rows))
        self.arrays = [numel, rows, streams]
        self.job = _Job(num_rows, ctypes.addressof(numel), ctypes.addressof(streams), 0)

    def __call__(self) -> None:
        self.library.floor_step(ctypes.byref(self.job), self.loop, len(self.tensors), torch.get_num_threads())


def cpu_floor(loop: str, streams: Sequence[Sequence[Tensor]]) -> Step:
    """Return a call that moves the bytes of `streams` (lists of equal numbers of CPU tensors) by `loop` of floors.c.

    Raises Unavailable without a C compiler.
    """
    floor = _Floor(_library(), LOOPS.index(loop), streams)
    floor.fill()
    return floor


def copy_floor(num_bytes: int, device: torch.device) -> Step:
    """Return a call that reads and writes `num_bytes` in total by copies on `device`."""
    half = max(1, num_bytes // 2)
    source = torch.zeros(min(half, COPY_BYTES), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    whole, rest = divmod(half, source.numel())

    def copy() -> None:
        for _ in range(whole):
            target.copy_(source)
        if rest:
            target[:rest].copy_(source[:rest])

    return copy


def compiler() -> str | None:
    """Return the C compiler: $CC, or the first of cc, gcc and clang; None without one."""
    candidates = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in candidates if name and (found := shutil.which(name))), None)


def _library() -> ctypes.CDLL:
    if not _loaded:
        _loaded.append(_build())
    return _loaded[0]


def _build() -> ctypes.CDLL:
    cc = compiler()
    if cc is None:
        raise Unavailable("there is no C compiler (cc, gcc, clang, or CC=...)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "floors.so"
        done = subprocess.run([cc, *FLAGS, str(SOURCE), "-o", str(path)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise Unavailable(f"{cc} does not compile floors.c: {done.stderr.strip()[-500:]}")
        library = ctypes.CDLL(str(path))  # stays mapped after the file is deleted
    library.floor_set_omp.argtypes = (ctypes.c_uint64,) * 3
    library.floor_step.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int)
    library.floor_set_omp(*_omp_addresses())
    return library


def _omp_addresses() -> tuple[int, ...]:
    """Return the addresses of torch's OpenMP functions; zeros, and so one thread, without GNU OpenMP."""
    process = ctypes.CDLL(None)
    try:
        return tuple(ctypes.cast(getattr(process, name), ctypes.c_void_p).value or 0 for name in OMP_FUNCTIONS)
    except AttributeError:
        return 0, 0, 0
