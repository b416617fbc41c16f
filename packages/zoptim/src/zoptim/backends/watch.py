"""Watching tensors: whether parameters, state or gradients were replaced or moved since a plan was made.

Problem: kernels use raw addresses, and `tensor.data = ...`, `set_`, offloading and `module.to(...)` move the memory
of an object, so every step must look at every tensor.  In Python that takes 0.1 us per tensor and question: several
times the update of a small tensor.

Design: the extension walks the containers in one call and compares what it finds with what it recorded (`tensors.c`);
it reads tensor objects through DLPack's C exchange API.  Without the extension, and for tensors that DLPack cannot
view, Python asks the same questions.

Rejected: hooks on assignment (none exist for `.data`), torch's headers (a wheel for each torch), reading addresses at
known offsets of torch's objects (no one promises the offsets).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends import native

__all__ = ["GradTrace", "Grads", "Trace", "gradients", "kinds_of"]

_DEPTH = 3  # [[[parameter]], {parameter: {name: tensor}}], as MOST_DEPTH of tensors.c


@attrs.frozen(eq=False)
class Trace:
    """What nested lists and dicts contained: tensors of lists, dicts and keys by identity; every tensor's address.

    It keeps all of them alive, so an equal identity is the same object and an equal address the same memory.
    """

    words: array[int]  # "Q"
    held: list[Any]

    @classmethod
    def of(cls, root: list[Any]) -> Trace:
        """Record `root`: lists of tensors, and dicts whose values are tensors or such dicts."""
        held: list[Any] = []
        return cls(array("Q", _walk(root, held)), held)

    def fits(self, root: list[Any]) -> bool:
        """Return whether `root` is as it was."""
        library = native.library()
        if library is None or not library.reads_tensors:
            return array("Q", _walk(root, [])) == self.words
        words = library.ffi.from_buffer("uint64_t[]", self.words)
        return bool(library.lib.zk_is_traced(id(root), words, len(self.words)))


def _walk(found: Any, held: list[Any], depth: int = 0, is_in_list: bool = True) -> Iterator[int]:
    """Yield the words of `walk` in tensors.c."""
    if isinstance(found, Tensor):
        held.append(found)
        if is_in_list:
            yield id(found)
        yield found.data_ptr()
    elif depth <= _DEPTH and isinstance(found, list):
        yield len(found)
        for value in found:
            yield from _walk(value, held, depth + 1)
    elif depth <= _DEPTH and isinstance(found, dict):
        held.append(found)
        yield id(found)
        for key, value in found.items():
            held.append(key)
            yield id(key)
            yield from _walk(value, held, depth + 1, False)


class Grads(enum.Enum):
    """The gradients of a step, compared with those of the last one."""

    SAME = "same"  # at the same addresses
    MOVED = "moved"  # of the same kinds, at other addresses
    OTHER = "other"  # of other kinds: a new plan and a new trace are needed


@attrs.define(eq=False)
class GradTrace:
    """Kinds and addresses of the gradients of a group.

    Kinds are everything that a plan assumes about a gradient but its address: whether it exists, dtype, device, shape
    and strides.  All are compared at every step, so no gradient is kept alive.
    """

    kinds: array[int] | tuple[list[Any], ...]  # the extension's words, or `kinds_of`
    addresses: array[int]  # "Q", one per parameter; 0 without a gradient

    @classmethod
    def of(cls, params: list[Tensor], weights: list[Tensor]) -> GradTrace:
        """Record the gradients of `params`; where one is None, that of the tensor in `weights`."""
        result = cls((), array("Q", [0]) * len(params))
        library = native.library()
        if library is not None and library.reads_tensors:
            view = library.ffi.from_buffer
            words = array("Q", [0]) * sum(2 + 2 * param.dim() for param in params)
            found = view("uint64_t[]", result.addresses)
            count = library.lib.zk_record_grads(id(params), id(weights), view("uint64_t[]", words), len(words), found)
            if count >= 0:
                result.kinds = words[:count]
                return result
        grads = gradients(params, weights)
        return cls(kinds_of(grads), _addresses(grads))

    def read(self, params: list[Tensor], weights: list[Tensor]) -> Grads:
        """Compare the gradients of this step, and take their addresses."""
        library = native.library()
        if library is not None and isinstance(self.kinds, array):
            view = library.ffi.from_buffer
            words, found = view("uint64_t[]", self.kinds), view("uint64_t[]", self.addresses)
            moved = library.lib.zk_read_grads(id(params), id(weights), words, len(self.kinds), found)
            return _RESULTS[moved]
        grads = gradients(params, weights)
        if kinds_of(grads) != self.kinds:
            return Grads.OTHER
        before, self.addresses = self.addresses, _addresses(grads)
        return Grads.SAME if before == self.addresses else Grads.MOVED


_RESULTS: Mapping[int, Grads] = {0: Grads.SAME, 1: Grads.MOVED, -1: Grads.OTHER}


def gradients(params: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients of parameters; where one is None, that of the tensor in `weights`."""
    return [p.grad if p.grad is not None else w.grad for p, w in zip(params, weights)]


def _addresses(grads: Sequence[Tensor | None]) -> array[int]:
    return array("Q", [0 if grad is None else grad.data_ptr() for grad in grads])


def kinds_of(grads: Sequence[Tensor | None]) -> tuple[list[Any], ...]:
    """Return everything that a plan assumes about gradients except addresses.  Lists, because they compare fast."""
    present = [grad for grad in grads if grad is not None]
    return (
        [grad is None for grad in grads],
        [grad.dtype for grad in present],
        [grad.device for grad in present],
        [grad.shape for grad in present],
        [grad.stride() if grad.layout is torch.strided else grad.layout for grad in present],
    )
