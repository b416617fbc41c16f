"""Watching tensors: whether parameters, state or gradients were replaced or moved since a plan was made.

Problem: kernels use raw addresses, and `tensor.data = ...`, `set_`, offloading and `module.to(...)` move the memory
of an object, so every step must look at every tensor.  In Python that takes 0.1 us per tensor and question: several
times the update of a small tensor.

Design: three readers, each of which the next one backs up.

1. `Watch` compares the words of memory that hold identities and addresses (`probe.py` finds their places), in one
   call that follows no pointer.  A difference proves nothing.
2. The extension walks the containers and compares what it finds with what it recorded (`tensors.c`); it reads
   tensor objects through DLPack's C exchange API.
3. Without the extension, and for tensors that DLPack cannot view, Python asks the same questions.

Rejected: hooks on assignment (none exist for `.data`), torch's headers (a wheel for each torch).
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends import native
from zoptim.backends.native import Reader

__all__ = ["GradTrace", "Grads", "Trace", "Watch", "gradients", "kinds_of"]

_MOST_DIM = 5  # a tensor of more dims keeps its sizes elsewhere, and new ones may lie at the same place
_DEPTH = 3  # [[[parameter]], {parameter: {name: tensor}}], as MOST_DEPTH of tensors.c


@attrs.frozen(eq=False)
class Watch:
    """Words of memory, and what they were.  The words before a place prove that it may be read."""

    places: array[int]  # "Q", addresses
    values: array[int]  # "Q"

    @classmethod
    def of(cls, record: Callable[[Any, Any, int], int], library: native.Library) -> Watch:
        """Record by a function of tensors.c that takes two arrays and their length."""
        view, null = library.ffi.from_buffer, library.ffi.NULL
        length = record(null, null, 0)
        result = cls(array("Q", bytes(8 * length)), array("Q", bytes(8 * length)))
        found = record(view("uint64_t[]", result.places), view("uint64_t[]", result.values), length)
        return result if found == length else NOTHING

    def holds(self, library: native.Library) -> bool:
        """Return whether every word is as it was; False if there is none."""
        view = library.ffi.from_buffer
        places, values = view("uint64_t[]", self.places), view("uint64_t[]", self.values)
        return bool(self.values) and bool(library.lib.zk_is_unchanged(places, values, len(self.values)))


NOTHING = Watch(array("Q"), array("Q"))


@attrs.define(eq=False)
class Trace:
    """What nested lists and dicts contained: tensors of lists, dicts and keys by identity; every tensor's address.

    It keeps all of them alive, so an equal identity is the same object and an equal address the same memory.
    """

    words: array[int]  # "Q"
    held: list[Any]
    root: list[Any] = attrs.field(factory=list)  # of the watch
    watch: Watch = NOTHING

    @classmethod
    def of(cls, root: list[Any]) -> Trace:
        """Record `root`: lists of tensors, and dicts whose values are tensors or such dicts."""
        held: list[Any] = []
        return cls(array("Q", _walk(root, held)), held)

    def fits(self, root: list[Any]) -> bool:
        """Return whether `root` is as it was."""
        library = native.library()
        if library is None or library.reader is Reader.NONE:
            return array("Q", _walk(root, [])) == self.words
        if _are_same(root, self.root) and self.watch.holds(library):
            return True
        self.watch = NOTHING
        words = library.ffi.from_buffer("uint64_t[]", self.words)
        is_same = bool(library.lib.zk_is_traced(id(root), words, len(self.words)))
        if not is_same:  # or a tensor that DLPack cannot view
            return array("Q", _walk(root, [])) == self.words
        if library.reader is Reader.WORDS:
            self.root = root
            self.watch = Watch.of(lambda *room: library.lib.zk_watch(id(root), *room), library)
        return True


def _are_same(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or lists of lists of the same objects; both are short."""
    if a is b or not (isinstance(a, list) and isinstance(b, list)):
        return a is b
    return len(a) == len(b) and all(map(_are_same, a, b))


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
    watch: Watch = NOTHING

    @classmethod
    def of(cls, params: list[Tensor], weights: list[Tensor]) -> GradTrace:
        """Record the gradients of `params`; where one is None, that of the tensor in `weights`."""
        result = cls((), array("Q", [0]) * len(params))
        library = native.library()
        if library is not None and library.reader is not Reader.NONE:
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
            if self.watch.holds(library):
                return Grads.SAME
            view = library.ffi.from_buffer
            words, found = view("uint64_t[]", self.kinds), view("uint64_t[]", self.addresses)
            result = _RESULTS[library.lib.zk_read_grads(id(params), id(weights), words, len(self.kinds), found)]
            self.watch = NOTHING
            if (
                result is Grads.SAME
                and library.reader is Reader.WORDS
                and all(param.dim() <= _MOST_DIM for param in params)
                and all(type(tensor).grad is Tensor.grad for tensor in (*params, *weights))  # not a class's own
            ):
                self.watch = Watch.of(
                    lambda *room: library.lib.zk_watch_grads(id(params), id(weights), *room), library
                )
            return result
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
