"""Trace: a record of every collective, with its size and times.

    with zcomm.traced([]) as log:
        zcomm.all_reduce(gradient, label="grad_bucket[3]")
    log[0].op, log[0].nbytes, log[0].ms

Traces are process-wide on purpose: autograd runs gradient hooks on its own threads, and a thread-local or
context-local trace would miss exactly these collectives.  A collective belongs to the traces that were open when it
was *issued*; its record is delivered when it has been waited for, because only then are its times known.  Records
come in the order of the waits; `Record.index` restores the order of issue.  A collective at world size 1 moves
nothing and is not recorded.  Under NCCL the stream waits, not the host: `Record.stall` holds two events around that
wait, to be read once they have passed.

Rejected: torch.profiler, which sees every kernel but knows no labels and costs a separate run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import attrs
import torch

__all__ = ["Record", "traced"]


@attrs.frozen
class Record:
    """One finished collective, as this rank saw it."""

    op: str  # "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"
    label: str  # the caller's name for it, "" if none
    nbytes: int  # bytes of this rank's payload: the larger of input and output
    ms: float  # host time from issue to the return of wait(), so work done in between is inside
    group_size: int  # ranks that took part, at least 2
    dtype: str  # of the payload, without the "torch." prefix; "" for a barrier
    numel: int  # elements of the payload
    wait_ms: float = 0.0  # the part of `ms` that this thread blocked in wait(): exposed communication
    index: int = 0  # process-wide number in order of issue
    stall: tuple[Any, ...] = ()  # on CUDA two events around the wait, on the stream that waited


Sink = Callable[[Record], None]
SinkT = TypeVar("SinkT", bound="Sink | list[Record]")

_lock = threading.RLock()  # guards changes of _open and makes deliveries one at a time
_open: tuple[Sink, ...] = ()  # replaced, never mutated: a reader needs no lock
_issued = itertools.count()


@contextmanager
def traced(sink: SinkT) -> Iterator[SinkT]:
    """Deliver a `Record` of every collective issued inside the block to `sink`.

    sink: a list (records are appended) or a callable of one record, called by the thread that waited, by one thread
    at a time.  Nested traces all receive.  Yields `sink`; raises TypeError for anything else.

    >>> import torch, zcomm
    >>> world = zcomm.init(device="cpu")
    >>> with zcomm.traced([]) as log:
    ...     _ = zcomm.all_reduce(torch.ones(4), label="loss")
    >>> [(record.op, record.label) for record in log]  # a single rank sends nothing
    []
    >>> world.close()
    """
    global _open
    deliver = _make_delivery(sink)
    with _lock:
        _open = (*_open, deliver)
    try:
        yield sink
    finally:
        with _lock:
            _open = tuple(other for other in _open if other is not deliver)


def stream_event(device: torch.device | None) -> tuple[Any, ...]:
    """A timing event recorded on the current stream of a CUDA device, as a tuple of one; empty on other devices."""
    if device is None or device.type != "cuda":
        return ()
    make: Callable[..., Any] = torch.cuda.Event
    event = make(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return (event,)


def _make_delivery(sink: object) -> Sink:
    """Make a new function that passes a record to `sink`; new, so that one sink may be open twice."""
    if isinstance(sink, list):
        return lambda record: sink.append(record)
    if callable(sink):
        return lambda record: sink(record)
    raise TypeError(f"traced() takes a list or a callable of one Record, got {type(sink).__name__}.")


def open_sinks() -> tuple[Sink, ...]:
    """Traces that are open now; a collective keeps them at its issue."""
    return _open


def next_index() -> int:
    return next(_issued)


def deliver(sinks: tuple[Sink, ...], record: Record) -> None:
    with _lock:
        for sink in sinks:
            sink(record)
