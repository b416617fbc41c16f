"""Jobs of the C kernels: one call updates a list of CPU tensors."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zoptim.backends import native, sources
from zoptim.backends.contract import FORMAT_OF_DTYPE, NONE, SPLIT, Hyper, Streams
from zoptim.backends.memory import addresses
from zoptim.backends.signals import Signals

__all__ = ["CpuJob"]


class CpuJob:
    """A job of the C kernels.

    Owns the arrays that its `zk_job` points to.  The caller keeps the tensors alive.
    """

    def __init__(self, rule: str, flags: int, streams: Streams) -> None:
        library = native.library()
        assert library is not None, "the caller checks reason_without_kernels first"
        self._ffi, self._lib = library.ffi, library.lib
        self._arrays: dict[Any, Any] = {}  # the targets of the job's pointers
        job = self._job = self._ffi.new("zk_job *")
        job.rule, job.flags, job.num_rows = sources.rule_number(rule), flags, len(streams.weights)
        job.weight = SPLIT if streams.remainders else FORMAT_OF_DTYPE[streams.weights[0].dtype]
        job.grad = FORMAT_OF_DTYPE[streams.grads[0].dtype]
        job.state = FORMAT_OF_DTYPE[streams.states[0][0].dtype] if streams.states else NONE
        job.copy = FORMAT_OF_DTYPE[streams.copies[0].dtype] if streams.copies else NONE
        job.numel = self._hold("numel", "int64_t[]", array("q", [tensor.numel() for tensor in streams.weights]))
        self._scratch("coefs", "char[]", job.num_rows * self._lib.zk_coef_bytes())
        if rule == "lamb":
            spans = sum(self._lib.zk_num_spans(tensor.numel()) for tensor in streams.weights)
            job.sums = self._scratch("sums", "double[]", 2 * job.num_rows)
            job.partials = self._scratch("partials", "double[]", 2 * spans)
        job.coefs = self._arrays["coefs"]
        self.bind(streams)

    def bind(self, streams: Streams) -> None:
        """See Job."""
        job = self._job
        job.weights = self._addresses("weights", streams.weights)
        job.grads = self._addresses("grads", streams.grads)
        job.remainders = self._addresses("remainders", streams.remainders)
        job.copies = self._addresses("copies", streams.copies)
        job.steps = self._addresses("steps", streams.steps)
        for k, (tensors, scales) in enumerate(zip(streams.states, streams.scales or [[]] * len(streams.states))):
            job.states[k] = self._addresses(f"states {k}", tensors)
            job.scales[k] = self._addresses(f"scales {k}", scales)

    def bind_grads(self, addresses: array[int]) -> None:
        """See Job."""
        self._job.grads = self._hold("grads", "uint64_t[]", addresses)

    def step(self, hyper: Hyper, signals: Signals) -> None:
        """See Job."""
        self._set(hyper, signals)
        self._lib.zk_step(self._job, native.num_threads())

    def sums(self, hyper: Hyper, signals: Signals) -> Tensor | None:
        """LAMB, first half: update moments, return (rows, 2) float64 squares of weights and directions.

        Returns None if found_inf is set.  `apply` reads the memory of the result: reduce it in place.
        """
        self._set(hyper, signals)
        if not self._lib.zk_lamb_sums(self._job, native.num_threads()):
            return None
        buffer = self._ffi.buffer(self._arrays["sums"])
        return torch.frombuffer(buffer, dtype=torch.float64).view(-1, 2)

    def apply(self) -> None:
        """LAMB, second half: update weights, by sums that are now those of whole tensors."""
        self._lib.zk_lamb_apply(self._job, native.num_threads())

    def _set(self, hyper: Hyper, signals: Signals) -> None:
        job = self._job
        job.lr = float(hyper.lr)
        job.beta1, job.beta2, job.eps, job.weight_decay = hyper.beta1, hyper.beta2, hyper.eps, hyper.weight_decay
        job.min_ratio, job.max_ratio = hyper.min_ratio, hyper.max_ratio
        job.grad_scale = self._scalar("grad_scale", signals.grad_scale)
        job.found_inf = self._scalar("found_inf", signals.found_inf)

    def _scalar(self, name: str, value: Tensor | None) -> Any:
        """Return the address of a () tensor as float32, which is kept alive until the next step."""
        value = self._arrays[name] = None if value is None else value.float()
        return self._ffi.NULL if value is None else self._ffi.cast("float *", value.data_ptr())

    def _addresses(self, name: str, tensors: Sequence[Tensor]) -> Any:
        return self._hold(name, "uint64_t[]", array("Q", addresses(tensors))) if tensors else self._ffi.NULL

    def _hold(self, name: str, kind: str, values: array[int]) -> Any:
        view = self._arrays[name] = self._ffi.from_buffer(kind, values)  # keeps `values` alive
        return view

    def _scratch(self, name: str, kind: str, length: int) -> Any:
        self._arrays[name] = self._ffi.new(kind, max(length, 1))
        return self._arrays[name]
