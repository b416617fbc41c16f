"""One kernel call over a list of tensors: what it reads and writes, and the CPU form of it.

Problem: a step over a thousand small tensors must not cost a thousand Python calls.  Design: the
addresses of all tensors are laid out once, in arrays that the kernel walks; a step hands over the
hyperparameters and makes one call.  Addresses that move (gradients, mostly) are written anew.

The kernels walk raw memory, so whatever reaches a job has been checked: `plan.py` sees to devices, dtypes,
sizes and layouts, and `WrittenRanges` here refuses streams that overlap.

Rejected: a call per tensor (0.8 us each, more than the arithmetic of a small tensor), and
`torch.library` operators (5 us and more a call).
"""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import torch
from torch import Tensor

from . import native
from ._compat import Signals

__all__ = [
    "BLOCK_NUMEL",
    "CpuJob",
    "Hyper",
    "Job",
    "Rule",
    "Streams",
    "WrittenRanges",
    "addresses",
    "flags_of",
    "num_bytes",
]

BLOCK_NUMEL = 256  # elements that share a scale of 8-bit states (ZK_BLOCK)


class Rule:
    """Rules and flags of zk_rules.h."""

    ADAM, SGD, ADAGRAD, LION, LAMB = range(5)
    DECOUPLED, AMSGRAD, MAXIMIZE, NESTEROV, NO_CORRECTION, EPS_INSIDE = (1 << k for k in range(6))


def flags_of(chosen: Mapping[int, object]) -> int:
    """The flags whose value is true."""
    return sum(flag for flag, is_on in chosen.items() if is_on)


# Formats of zk_math.h, of what has no dtype of its own.
NONE, SPLIT = 0, 4
FORMAT_OF_DTYPE = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 5}


@attrs.frozen(kw_only=True)
class Hyper:
    """Hyperparameters of one group, as zk_hyper names them."""

    lr: float | Tensor  # a tensor of one element may stay on its device
    beta1: float = 0.0  # SGD: momentum; Adagrad: lr_decay
    beta2: float = 0.0  # SGD: dampening
    eps: float = 0.0
    weight_decay: float = 0.0
    min_ratio: float = 0.0  # LAMB: bounds of the trust ratio
    max_ratio: float = 0.0


@attrs.frozen(eq=False, kw_only=True)
class Streams:
    """What a kernel call reads and writes: lists of equal length, one dtype and device a list; empty is absent."""

    weights: list[Tensor]
    grads: list[Tensor]
    states: tuple[list[Tensor], ...] = ()  # up to 3, in the order of the rule; uint8 codes when 8-bit
    scales: tuple[list[Tensor], ...] = ()  # (ceil(numel / 256),) float32, beside 8-bit codes
    remainders: list[Tensor] = attrs.field(factory=list)  # int16, of split masters
    copies: list[Tensor] = attrs.field(factory=list)  # bf16 or fp16, receive the new weights
    steps: list[Tensor] = attrs.field(factory=list)  # () float32; rows of one tensor share one

    def written(self) -> list[list[Tensor]]:
        """The lists that a step writes, but for the counts."""
        lists = [self.weights, *self.states, *self.scales, self.remainders, self.copies]
        return [tensors for tensors in lists if tensors]


class Job(Protocol):
    """One kernel call, ready to be repeated."""

    def point(self, streams: Streams) -> None:
        """Read all addresses anew; lengths, dtypes and sizes are those that the job was made for."""

    def step(self, hyper: Hyper, signals: Signals) -> None:
        """One update; nothing at all where found_inf is set."""


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """Where the tensors' elements begin."""
    return list(map(Tensor.data_ptr, tensors))


def num_bytes(tensors: Sequence[Tensor]) -> array[int]:
    """The sizes of the tensors."""
    return array("q", [tensor.numel() * tensor.element_size() for tensor in tensors])


@attrs.define(eq=False)
class WrittenRanges:
    """The memory that a step writes, sorted, to tell whether anything else lies in it.

    Invariant: ranges are disjoint.  `make` returns the position of a list and a tensor in it that overlaps another
    tensor instead, where there is one.
    """

    starts: array[int]
    ends: array[int]

    @classmethod
    def make(cls, lists: Sequence[Sequence[Tensor]], steps: Sequence[Tensor] = ()) -> WrittenRanges | tuple[int, int]:
        """Empty tensors have no range; neighbours in `steps` may be one tensor, the count of both."""
        found = []
        for which, tensors in enumerate([*lists, steps]):
            seen = None
            for position, (start, size) in enumerate(zip(addresses(tensors), num_bytes(tensors))):
                if size and tensors[position] is not seen:
                    found.append((start, start + size, which, position))
                seen = tensors[position] if tensors is steps else None
        found.sort()
        for before, after in itertools.pairwise(found):
            if after[0] < before[1]:
                return after[2:]
        return cls(array("Q", [f[0] for f in found]), array("Q", [f[1] for f in found]))

    def find(self, starts: Sequence[int], sizes: array[int]) -> int | None:
        """The index of the first of other ranges, which begin at `starts` and have `sizes` bytes, that overlaps
        one."""
        library = native.library()
        if library is not None:
            view = library.ffi.from_buffer
            index = library.lib.zk_find_overlap(
                len(self.starts), view("uint64_t[]", self.starts), view("uint64_t[]", self.ends),
                len(starts), view("uint64_t[]", array("Q", starts)), view("int64_t[]", sizes),
            )  # fmt: skip
            return None if index < 0 else int(index)
        for index, (start, size) in enumerate(zip(starts, sizes)):
            after = bisect.bisect_right(self.ends, start)
            if size and after < len(self.starts) and self.starts[after] < start + size:
                return index
        return None


class CpuJob:
    """A job of the C kernels.

    Keeps the arrays that its `zk_job` points to.  The tensors behind the addresses are the caller's to keep alive.
    """

    def __init__(self, rule: int, flags: int, streams: Streams) -> None:
        library = native.library()
        assert library is not None, "whoever chooses this path has asked for the library"
        self._ffi, self._lib = library.ffi, library.lib
        self._arrays: dict[Any, Any] = {}  # what the job's pointers point to
        job = self._job = self._ffi.new("zk_job *")
        job.rule, job.flags, job.num_rows = rule, flags, len(streams.weights)
        job.weight = SPLIT if streams.remainders else FORMAT_OF_DTYPE[streams.weights[0].dtype]
        job.grad = FORMAT_OF_DTYPE[streams.grads[0].dtype]
        job.state = FORMAT_OF_DTYPE[streams.states[0][0].dtype] if streams.states else NONE
        job.copy = FORMAT_OF_DTYPE[streams.copies[0].dtype] if streams.copies else NONE
        job.numel = self._hold("numel", "int64_t[]", array("q", [tensor.numel() for tensor in streams.weights]))
        self._scratch("coefs", "char[]", job.num_rows * self._lib.zk_coef_bytes())
        if rule == Rule.LAMB:
            spans = sum(self._lib.zk_num_spans(tensor.numel()) for tensor in streams.weights)
            job.sums = self._scratch("sums", "double[]", 2 * job.num_rows)
            job.partials = self._scratch("partials", "double[]", 2 * spans)
        job.coefs = self._arrays["coefs"]
        self.point(streams)

    def point(self, streams: Streams) -> None:
        """See Job."""
        job = self._job
        job.weights = self._point("weights", streams.weights)
        job.grads = self._point("grads", streams.grads)
        job.remainders = self._point("remainders", streams.remainders)
        job.copies = self._point("copies", streams.copies)
        job.steps = self._point("steps", streams.steps)
        for k, (tensors, scales) in enumerate(zip(streams.states, streams.scales or [[]] * len(streams.states))):
            job.states[k] = self._point(f"states {k}", tensors)
            job.scales[k] = self._point(f"scales {k}", scales)

    def step(self, hyper: Hyper, signals: Signals) -> None:
        """See Job."""
        self._set(hyper, signals)
        self._lib.zk_step(self._job, native.num_threads())

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor | None:
        """LAMB, first half: moments, and (rows, 2) float64 squares of weights and directions.

        None when found_inf is set.  The result is the memory that `apply` reads: reduce it in place.
        """
        self._set(hyper, signals)
        if not self._lib.zk_lamb_sums(self._job, native.num_threads()):
            return None
        buffer = self._ffi.buffer(self._arrays["sums"])
        return torch.frombuffer(buffer, dtype=torch.float64).view(-1, 2)

    def apply(self) -> None:
        """LAMB, second half: the weights move, by sums that are now those of whole tensors."""
        self._lib.zk_lamb_apply(self._job, native.num_threads())

    def _set(self, hyper: Hyper, signals: Signals) -> None:
        job = self._job
        job.lr = float(hyper.lr)
        job.beta1, job.beta2, job.eps, job.weight_decay = hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
        job.min_ratio, job.max_ratio = hyper.min_ratio, hyper.max_ratio
        job.grad_scale = self._scalar("grad_scale", signals.grad_scale)
        job.found_inf = self._scalar("found_inf", signals.found_inf)

    def _scalar(self, name: str, value: Tensor | None) -> Any:
        """The address of a () tensor as float32, which is kept until the next step."""
        value = self._arrays[name] = None if value is None else value.float()
        return self._ffi.NULL if value is None else self._ffi.cast("float *", value.data_ptr())

    def _point(self, name: str, tensors: Sequence[Tensor]) -> Any:
        return self._hold(name, "uint64_t[]", array("Q", addresses(tensors))) if tensors else self._ffi.NULL

    def _hold(self, name: str, kind: str, values: array[int]) -> Any:
        view = self._arrays[name] = self._ffi.from_buffer(kind, values)  # keeps `values` alive
        return view

    def _scratch(self, name: str, kind: str, length: int) -> Any:
        self._arrays[name] = self._ffi.new(kind, max(length, 1))
        return self._arrays[name]
