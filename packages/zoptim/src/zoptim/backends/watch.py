"""Watching tensors: whether parameters, state or gradients were replaced or moved since a plan was made.

Problem: kernels use raw addresses, and `tensor.data = ...`, `set_`, offloading and `module.to(...)` move the memory
of an object, so every step must look at every tensor.  In Python that takes 0.1 us per tensor and question: several
times the update of a small tensor.

Design: three readers, each of which the next one backs up.

1. By words: the extension compares the words of memory that hold identities, addresses, sizes and strides with
   recorded ones (`tensors.c`; `probe.py` finds their places).  A difference proves nothing.
2. By objects: it walks the containers and compares what it finds with what it recorded; it reads tensor objects
   through DLPack's C exchange API.
3. Without the extension, and for tensors that DLPack cannot view, Python asks the same questions.

A tensor is the same if its address, dtype, shape and strides are: `weight.data = weight.data.t()` keeps the address,
and its state would be in another order.

Rejected: hooks on assignment (none exist for `.data`), torch's headers (a wheel for each torch).
"""

from __future__ import annotations

import enum
import functools
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.backends import native
from zoptim.backends.native import Reader

__all__ = ["GradTrace", "Grads", "Trace", "gradients", "kinds_of", "watch_tensors"]

_ROW_WORDS = 15  # of tensors.c
_DEPTH = 3  # [[[parameter]], {parameter: {name: tensor}}], as MOST_DEPTH of tensors.c


@attrs.define(eq=False)
class Trace:
    """What nested lists and dicts contained: tensors, dicts and keys by identity; every tensor's address and kind.

    It keeps all of them alive, so an equal identity is the same object and an equal address the same memory.
    """

    record: array[int] | list[Any]  # of the extension, "Q", or of Python
    held: list[Any]
    root: list[Any] = attrs.field(factory=list)  # of the watch
    watch: Watch | None = None

    @classmethod
    def of(cls, root: list[Any]) -> Trace:
        """Record `root`: lists of tensors, and dicts whose values are tensors or such dicts."""
        library, held = native.library(), list[Any]()
        if library is not None and library.reader is not Reader.NONE:
            words = _fill(library, lambda *room: library.lib.zk_trace(id(root), id(held), *room))
            if words is not None:
                return cls(words, held)
        held = []
        return cls(list(_walk(root, held)), held)

    def fits(self, root: list[Any]) -> bool:
        """Return whether `root` is as it was."""
        library = native.library()
        if library is None or library.reader is Reader.NONE or isinstance(self.record, list):
            return list(_walk(root, [])) == self.record
        if self.watch is not None and _are_same(root, self.root) and self.watch.holds():
            return True
        self.watch = None
        words = library.ffi.from_buffer("uint64_t[]", self.record)
        if not library.lib.zk_is_traced(id(root), words, len(self.record)):
            return False
        if library.reader is Reader.WORDS:
            self.root, self.watch = root, Watch.of(root, library)
        return True


@attrs.frozen(eq=False)
class Watch:
    """Words of memory that change with the tensors of a root.  The words before a place prove that it may be read."""

    holds: Callable[[], int]  # returns whether every word is as it was
    words: array[int]  # "Q"

    @classmethod
    def of(cls, root: list[Any], library: native.Library) -> Watch | None:
        """Record the words; None if they cannot tell."""
        words = _fill(library, lambda *room: library.lib.zk_watch(id(root), *room))
        if not words:
            return None
        view = library.ffi.from_buffer("uint64_t[]", words)
        return cls(functools.partial(library.lib.zk_is_unchanged, view, len(words)), words)


def watch_tensors(root: list[Any]) -> Callable[[], bool]:
    """Return a function that tells, in a few nanoseconds for each, whether no tensor was moved or has another layout.

    root: tensors, and dicts that may hold tensors (parameters of modules); it is kept alive and must not change.

    The function returns True only if all tensors are at the same addresses with the same dtype, shape and strides,
    and the dicts have the same keys and values.  False proves nothing; without the extension it is always False.
    """
    library = native.library()
    watch = Watch.of(root, library) if library is not None and library.reader is Reader.WORDS else None
    if watch is None:
        return lambda: False
    held = Trace.of(root).held  # a dict that changes would drop what is compared
    return functools.partial(_holds, watch, root, held)


def _holds(watch: Watch, *_held: list[Any]) -> bool:
    return bool(watch.holds())


def _fill(library: native.Library, record: Callable[[Any, int], int]) -> array[int] | None:
    """Return what `record` writes into an array of the length that it returns; None if it fails."""
    length = record(library.ffi.NULL, 0)
    if length < 0:
        return None
    words = array("Q", bytes(8 * length))
    return words if record(library.ffi.from_buffer("uint64_t[]", words), length) == length else None


def _are_same(a: Any, b: Any) -> bool:
    """Return whether two values are one object, or lists of lists of the same objects; both are short."""
    if a is b or not (isinstance(a, list) and isinstance(b, list)):
        return a is b
    return len(a) == len(b) and all(map(_are_same, a, b))


def _walk(found: Any, held: list[Any], depth: int = 0) -> Iterator[Any]:
    """Yield what `walk` in tensors.c records."""
    if isinstance(found, Tensor):
        held.append(found)
        yield id(found)
        yield found.data_ptr()
        yield kinds_of([found])
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
            yield from _walk(value, held, depth + 1)


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
    rows: Any = None  # words of memory that describe the gradients, as zk_note_grads records them; None: unknown

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
            view = library.ffi.from_buffer
            found = view("uint64_t[]", self.addresses)
            if self.rows is not None:
                result = _RESULTS[library.lib.zk_read_noted(id(params), id(weights), self.rows, found)]
                if result is not Grads.OTHER:
                    return result
            words = view("uint64_t[]", self.kinds)
            result = _RESULTS[library.lib.zk_read_grads(id(params), id(weights), words, len(self.kinds), found)]
            self.rows = None
            if result is not Grads.OTHER and library.reader is Reader.WORDS:
                rows = view("uint64_t[]", array("Q", bytes(8 * _ROW_WORDS * len(params))))
                self.rows = rows if library.lib.zk_note_grads(id(params), id(weights), rows) else None
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
