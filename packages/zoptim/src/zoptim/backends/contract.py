"""The contract of kernels: rules, flags, formats, hyperparameters, streams, and the job.

A job updates a list of tensors in one call: it reads addresses once, and each step passes the hyperparameters.
`cpu.py` and `gpu/job.py` implement it.  The name of a rule is that of its kernel text, `csrc/rules/<name>.h`; see
`sources.py`.

Kernels use raw addresses, so callers check everything first: `updates/plan.py` checks devices, dtypes, sizes and
layouts, `memory.py` finds streams that overlap.

Rejected: a call per tensor (0.8 us each, more than the arithmetic of a small tensor), and `torch.library` operators
(5 us and more per call).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Mapping
from typing import Protocol

import attrs
import torch
from torch import Tensor

from zoptim.backends.signals import Signals

__all__ = [
    "BLOCK_NUMEL",
    "FORMAT_OF_DTYPE",
    "NONE",
    "SPAN_NUMEL",
    "SPLIT",
    "Flag",
    "Hyper",
    "Job",
    "Streams",
    "flags_of",
]

BLOCK_NUMEL = 256  # elements that share a scale of 8-bit states (ZK_BLOCK)
SPAN_NUMEL = 16384  # elements of one partial sum (ZK_SPAN)


class Flag(enum.IntFlag):
    """The flags of zk_rules.h.  Some select a rule's loop (`sources.py`), others only change its coefficients."""

    DECOUPLED = 1
    AMSGRAD = 2
    MAXIMIZE = 4
    NESTEROV = 8
    NO_CORRECTION = 16
    EPS_INSIDE = 32


def flags_of(chosen: Mapping[Flag, object]) -> int:
    """Combine the flags whose value is true."""
    return sum(flag for flag, is_on in chosen.items() if is_on)


# Formats of zk_math.h that have no dtype.
NONE, SPLIT = 0, 4
FORMAT_OF_DTYPE = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 5}


@attrs.frozen(kw_only=True)
class Hyper:
    """Hyperparameters of one group, with the names of zk_hyper."""

    lr: float | Tensor  # a tensor of one element may stay on its device
    beta1: float = 0.0  # SGD: momentum; Adagrad: lr_decay
    beta2: float = 0.0  # SGD: dampening
    eps: float = 0.0
    weight_decay: float = 0.0
    min_ratio: float = 0.0  # LAMB: bounds of the trust ratio
    max_ratio: float = 0.0


@attrs.frozen(eq=False, kw_only=True)
class Streams:
    """The tensors of a kernel call: lists of equal length, each of one dtype and device; an empty list is absent."""

    weights: list[Tensor]
    grads: list[Tensor]
    states: tuple[list[Tensor], ...] = ()  # up to 3, in the order of the rule; uint8 codes when 8-bit
    scales: tuple[list[Tensor], ...] = ()  # (ceil(numel / 256),) float32, for 8-bit codes
    remainders: list[Tensor] = attrs.field(factory=list)  # int16, of split masters
    copies: list[Tensor] = attrs.field(factory=list)  # bf16 or fp16, receive the new weights
    steps: list[Tensor] = attrs.field(factory=list)  # () float32; rows of one tensor share a count

    def written(self) -> list[list[Tensor]]:
        """Return the lists that a step writes, without the counts."""
        lists = [self.weights, *self.states, *self.scales, self.remainders, self.copies]
        return [tensors for tensors in lists if tensors]


class Job(Protocol):
    """A kernel call that can be repeated."""

    def bind(self, streams: Streams) -> None:
        """Read all addresses again; lengths, dtypes and sizes must be those of the constructor."""

    def bind_grads(self, addresses: array[int]) -> None:
        """Read the gradients at other addresses ("Q"), one per row; the caller keeps the memory until the step."""

    def step(self, hyper: Hyper, signals: Signals) -> None:
        """Update all tensors; change nothing if found_inf is set."""
