"""Recorder of what a program asks of a device, from the host's side: the input of replay.py.

A dispatch mode sees every operator of this thread, and of autograd's threads on its behalf, with the memory that it
reads and writes; records and waits are seen by wrapping the methods of torch.cuda.  Kernels that are not torch's are
told: the steps of zoptim's jobs.  Works on a GPU and on the simulated device.

Not seen: threads of the program's own, and frees.  A free is noticed when its memory is handed out again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

__all__ = ["Recorder", "recorded"]

# Operators that ask only for shapes, or have no access of their own.
WITHOUT_ACCESS = frozenset(
    {"empty_like", "new_empty", "new_empty_strided", "is_pinned", "is_same_size", "set_", "resize_", "_pin_memory"}
)
SHAPES_ONLY = frozenset({"zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_full"})
HOST_WAITS = frozenset({"_local_scalar_dense", "equal", "nonzero", "masked_select", "is_nonzero"})
EMPTY = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


def _range(tensor: Tensor) -> tuple[int, int]:
    """Return the bytes from the first element to the last."""
    if not tensor.numel():
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, Tensor)]


@attrs.define(eq=False)
class Recorder:
    """The record so far.  `entries` has small numbers for events and for addresses, counted from the lowest."""

    raw: list[list[Any]] = attrs.field(factory=list)
    events: dict[int, int] = attrs.field(factory=dict)  # number by identity
    kept: list[Any] = attrs.field(factory=list)  # events, so that an identity is used once
    jobs: weakref.WeakKeyDictionary[Any, list[Tensor]] = attrs.field(factory=weakref.WeakKeyDictionary)

    def put(self, *entry: Any) -> None:
        self.raw.append(list(entry))

    def stream(self, stream: Any = None) -> int:
        found = torch.cuda.current_stream() if stream is None else stream
        return int(found.stream_id)

    def event(self, event: Any) -> int:
        if id(event) not in self.events:
            self.kept.append(event)
            self.events[id(event)] = len(self.events)
        return self.events[id(event)]

    def work(self, name: str, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """Note an operation on tensors: a launch if one is on the device, else the host's access to pinned memory."""
        on_device = any(each.is_cuda for each in (*reads, *writes))
        spans = [
            [_range(each) for each in tensors if each.numel() and (each.is_cuda or each.is_pinned())]
            for tensors in (reads, writes)
        ]
        if on_device:
            self.put("launch", self.stream(), name, *spans)
        elif any(spans):
            self.put("host", name, *spans)

    def made(self, tensor: Tensor) -> None:
        """Note memory that an operator has allocated."""
        low = tensor.untyped_storage().data_ptr()
        if low and (tensor.is_cuda or tensor.is_pinned()):
            stream = self.stream() if tensor.is_cuda else -1
            self.put("allocate", stream, low, low + tensor.untyped_storage().nbytes())

    def bound(self, job: Any, streams: Any) -> None:
        """Remember the tensors of a job of zoptim."""
        self.jobs[job] = [tensor for tensors in (*streams.written(), streams.grads) for tensor in tensors]

    def stepped(self, job: Any) -> None:
        """Note what the kernels of a job touch.  Gradients that were bound by address alone are not known."""
        self.work("a kernel of zoptim", [], self.jobs.get(job, []))

    def entries(self) -> list[list[Any]]:
        """Return the record with addresses counted from the lowest."""
        spans = [span for entry in self.raw for span in _spans(entry)]
        lowest = min((low for low, _ in spans), default=0)
        return [_moved(entry, lowest) for entry in self.raw]


def _spans(entry: list[Any]) -> list[tuple[int, int]]:
    if entry[0] in ("launch", "host"):
        return [*entry[-2], *entry[-1]]
    return [(entry[2], entry[3])] if entry[0] in ("allocate", "use") else []


def _moved(entry: list[Any], lowest: int) -> list[Any]:
    if entry[0] in ("launch", "host"):
        return [*entry[:-2], *([[low - lowest, high - lowest] for low, high in spans] for spans in entry[-2:])]
    return [*entry[:2], entry[2] - lowest, entry[3] - lowest] if entry[0] in ("allocate", "use") else entry


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes each operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.rpartition("::")[2]
        if name == "record_stream":
            low, high = _storage_range(args[0])
            self.recorder.put("use", self.recorder.stream(args[1]), low, high)
            return func(*args, **kwargs)
        inputs = _tensors((args, kwargs))
        own = {each.untyped_storage()._cdata for each in inputs}
        result = func(*args, **kwargs)
        if any(argument.alias_info and not argument.alias_info.is_write for argument in func._schema.arguments):
            return result  # a view
        fresh = [each for each in _tensors(result) if each.untyped_storage()._cdata not in own]
        for each in fresh:
            self.recorder.made(each)
        written = _written(func._schema, args, kwargs)
        reads = [] if name in SHAPES_ONLY or name in WITHOUT_ACCESS else inputs
        if name not in WITHOUT_ACCESS and name not in EMPTY:
            self.recorder.work(name, reads, [*written, *fresh])
        self._note_wait(name, args, kwargs, result)
        return result

    def _note_wait(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note that the host waits for a copy, or for a value."""
        inputs, outputs = _tensors(args), _tensors(result)
        crosses = any(each.is_cuda for each in inputs) != any(each.is_cuda for each in outputs)
        if name == "copy_":
            crosses = args[0].is_cuda != args[1].is_cuda
            pageable = not args[0].is_cuda and not args[0].is_pinned()
        else:
            pageable = bool(outputs) and not outputs[0].is_cuda and not outputs[0].is_pinned()
        is_async = bool(kwargs.get("non_blocking")) or (name == "copy_" and len(args) > 2 and bool(args[2]))
        copies = name in ("copy_", "_to_copy") and crosses and (pageable or not is_async)
        if copies or (name in HOST_WAITS and any(each.is_cuda for each in inputs)):
            self.recorder.put("wait stream", self.recorder.stream())


def _storage_range(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _written(schema: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the arguments that an operator writes."""
    found: list[Tensor] = []
    for index, argument in enumerate(schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            found += _tensors(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


@contextlib.contextmanager
def recorded() -> Iterator[Recorder]:
    """Record what the body asks of the device."""
    recorder = Recorder()
    with contextlib.ExitStack() as stack:
        for owner, name, note in _notes(recorder):
            stack.enter_context(_noting(owner, name, note))
        stack.enter_context(_Mode(recorder))
        yield recorder


def _notes(recorder: Recorder) -> Iterator[tuple[Any, str, Callable[..., None]]]:
    """Yield the methods to wrap: owner, name, and what a call notes."""
    cuda: Any = torch.cuda
    put, stream, event = recorder.put, recorder.stream, recorder.event
    yield cuda.Event, "record", lambda self, given=None: put("record", stream(given), event(self))
    yield cuda.Event, "wait", lambda self, given=None: put("wait", stream(given), event(self))
    yield cuda.Event, "synchronize", lambda self: put("wait host", event(self))
    yield cuda.Stream, "wait_event", lambda self, given: put("wait", stream(self), event(given))
    yield cuda.Stream, "synchronize", lambda self: put("wait stream", stream(self))
    yield cuda, "synchronize", lambda device=None: put("wait all")
    from zoptim.backends.cpu import CpuJob
    from zoptim.backends.gpu import GpuJob

    for kind in (CpuJob, GpuJob):
        yield kind, "__init__", lambda job, rule, flags, streams, *_: recorder.bound(job, streams)
        yield kind, "bind", recorder.bound
        yield kind, "step", lambda job, *_: recorder.stepped(job)


@contextlib.contextmanager
def _noting(owner: Any, name: str, note: Callable[..., None]) -> Iterator[None]:
    """Call `note` before each call of a method or function."""
    is_own = name in vars(owner)
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def method(*args: Any, **kwargs: Any) -> Any:
        note(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, plain)
        else:
            delattr(owner, name)
