"""A job on a CUDA device: the methods of CpuJob, as asynchronous launches."""

from __future__ import annotations

import struct
from array import array
from typing import Final

import attrs
import torch
from torch import Tensor

from zoptim.backends.contract import Hyper, Streams
from zoptim.backends.gpu.launch import Call, CupyLauncher, Launcher
from zoptim.backends.gpu.source import COMMON, Formats, Program
from zoptim.backends.gpu.tables import GRADS, Table, columns_of, make_items
from zoptim.backends.signals import Signals
from zoptim.backends.sources import rule_number

__all__ = ["GpuJob"]

_ARGS = struct.Struct("<8Q4q7d")  # zk_step_args
_COEF_BYTES = 48  # zk_coef
_LR_DTYPES = (torch.float32, torch.float64)


class GpuJob:
    """Updates rows on one CUDA device: `step` is two launches, four for LAMB, and one more if addresses moved.

    No method synchronizes with the device.  The constructor allocates all buffers, so after the first step (which may
    compile) further steps can be captured in a CUDA graph.  The graph reads learning rate, gradient scale, found_inf
    and step counts from device memory when it runs; other hyperparameters are those of the capture.

    Gradients may be float32, bfloat16 or float16 and are never written.  If found_inf is set, a step writes nothing.
    The job keeps all tensors alive but gradients, which the caller keeps until `step` has returned: torch's allocator
    reuses freed memory in the order of the stream.
    """

    def __init__(self, rule: str, flags: int, streams: Streams, launcher: Launcher | None = None) -> None:
        """Allocate tables and buffers; `launcher` defaults to CuPy's.

        Raises RuntimeError during capture of a CUDA graph, ValueError for streams on several devices.
        """
        device = _one_device(streams)
        self._streams = _without_grads(streams)  # keeps the tensors behind the addresses alive
        self._launcher: Final = launcher or CupyLauncher(device)
        self._rule, self._flags = rule, flags
        program = Program.of(rule, flags, Formats.of(streams))
        self._kernels = {**self._launcher.load(COMMON), **self._launcher.load(program)}
        numels = [tensor.numel() for tensor in streams.weights]
        self._items, first_items = make_items(numels, program.chunk_numel, device)
        self._table = Table.make(columns_of(streams), [numels, first_items], device)
        num_rows, num_items = len(numels), len(self._items)
        self._coefs = torch.empty(num_rows * _COEF_BYTES, dtype=torch.uint8, device=device)
        sums = (num_rows, num_items) if rule == "lamb" else (0, 0)
        self._sums, self._partials = (torch.zeros(n, 2, dtype=torch.float64, device=device) for n in sums)
        self._buffers = (self._items, self._table.words, self._coefs, self._sums, self._partials)
        self._args = b""  # of the last step
        self._held: tuple[Tensor | None, ...] = ()  # scalars that the last step read

    def bind(self, streams: Streams) -> None:
        """See Job.  Costs a launch for every 480 addresses that moved, none if nothing moved."""
        self._streams = _without_grads(streams)
        moved = self._table.move(columns_of(streams))
        self._launch([Call(self._kernels["zk_patch"], 1, args) for args in moved])

    def bind_grads(self, addresses: array[int]) -> None:
        """See Job."""
        columns = [*self._table.known]
        columns[GRADS] = addresses.tolist()
        self._launch([Call(self._kernels["zk_patch"], 1, args) for args in self._table.move(columns)])

    def step(self, hyper: Hyper, signals: Signals) -> None:
        """See Job."""
        self._set(hyper, signals)
        if self._rule == "lamb":
            self._launch([*self._first_half(), *self._second_half()])
        else:
            self._launch([self._call("zk_prepare_rows", 1), *self._per_item("zk_update")])

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor:
        """LAMB, first half: update moments and counts, return (rows, 2) float64 squares of weights and directions.

        `apply` reads the memory of the result: reduce it in place.  If found_inf is set, the result is undefined and
        neither half changes anything.
        """
        self._set(hyper, signals)
        self._launch(self._first_half())
        return self._sums

    def apply(self) -> None:
        """LAMB, second half: update weights, by sums that are now those of whole tensors."""
        self._launch(self._second_half())

    def _first_half(self) -> list[Call]:
        return [
            self._call("zk_prepare_rows", 1),
            *self._per_item("zk_lamb_sums"),
            self._call("zk_lamb_rows", len(self._table.words)),
        ]

    def _second_half(self) -> list[Call]:
        return self._per_item("zk_lamb_apply")

    def _call(self, name: str, num_blocks: int) -> Call:
        return Call(self._kernels[name], num_blocks, self._args)

    def _per_item(self, name: str) -> list[Call]:
        """Launch a block for every chunk; no launch if all rows are empty."""
        return [self._call(name, len(self._items))] if len(self._items) else []

    def _launch(self, calls: list[Call]) -> None:
        if calls:
            self._launcher.launch(calls, self._buffers)

    def _set(self, hyper: Hyper, signals: Signals) -> None:
        """Pack zk_step_args."""
        lr, value = self._learning_rate(hyper.lr)
        self._held = (
            lr,
            self._scalar("grad_scale", signals.grad_scale),
            self._scalar("found_inf", signals.found_inf),
        )
        buffers = (self._table.words, self._items, self._coefs, self._partials, self._sums)
        self._args = _ARGS.pack(
            *(0 if tensor is None else tensor.data_ptr() for tensor in (*buffers, *self._held)),
            len(self._table.words),
            rule_number(self._rule),
            self._flags,
            lr is not None and lr.dtype is torch.float64,
            value,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.weight_decay,
            hyper.min_ratio,
            hyper.max_ratio,
        )

    def _learning_rate(self, lr: float | Tensor) -> tuple[Tensor | None, float]:
        """Return (tensor that the device reads, 0.0), or (None, number)."""
        if isinstance(lr, Tensor) and lr.device == self._items.device:
            return (lr.detach() if lr.dtype in _LR_DTYPES else lr.detach().double()), 0.0
        return None, float(lr)

    def _scalar(self, name: str, scalar: Tensor | None) -> Tensor | None:
        """Return `scalar` as float32.  Raises ValueError if it is on another device."""
        if scalar is not None and scalar.device != self._items.device:
            raise ValueError(f"{name} is on {scalar.device}, the weights are on {self._items.device}; move it there.")
        return None if scalar is None else scalar.float()


def _without_grads(streams: Streams) -> Streams:
    return attrs.evolve(streams, grads=[])


def _one_device(streams: Streams) -> torch.device:
    """Return the device of all streams.  Raises ValueError for several: a foreign address would kill the process."""
    device = streams.weights[0].device
    for tensors in (streams.grads, *streams.written()):
        for position, tensor in enumerate(tensors):
            if tensor.device != device:
                raise ValueError(
                    f"tensor {position} of the update has a stream on {tensor.device} and weights on {device}; "
                    "move both to one device."
                )
    return device
