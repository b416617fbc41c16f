"""Two-level collectives: through shared memory inside a host, over Gloo between hosts, of one rank or several.

Between hosts only ranks of equal index communicate, each with its share of the host's data.  Every function is a
generator of steps for the group's task queue.  A large tensor passes in chunks, which bounds the extra memory; while
one chunk is on the network, the next is reduced in memory.

    all_reduce      reduce_scatter on the host; exchange and sum between ranks of equal index; all_gather on the host
    reduce_scatter  one reduce_scatter on the host for the ranks of each host; exchange and sum of the results
    all_gather      slices of equal index between hosts, straight into the output; one all_gather for each host
    broadcast       on the source's host to all ranks; each sends its share to the other hosts, which gather it
    barrier         on the host, then between hosts: a rank that passes the second knows that all passed the first

[Note: order of sums]  Elements are summed in the order of a host's ranks and then of the hosts, ordered by their
first ranks; 16-bit floats in float32, rounded once on each host and once over the hosts.  So all_reduce and
reduce_scatter give the same bits on all ranks, however the tensor is cut.  A group on one host rounds once, so the
same ranks on one host may differ in the last bit of a 16-bit sum.

all_to_all stays with Gloo: two levels would send the same bytes between hosts and copy all of them twice more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zcomm.shared.host_layout import HostLayout
from zcomm.shared.native import DTYPES, REDUCTIONS
from zcomm.shared.network import Network
from zcomm.shared.task_queue import Step
from zcomm.shared.transport import Message, Transport

__all__ = ["COLLECTIVES", "Levels", "spans"]

SMALL_BYTES = 64 * 1024  # up to this size, fewer messages are faster than shorter ones
FEW_BYTES = 1024 * 1024  # up to this size, two hosts send each other the whole: more to add, one message less
SUMMED_BYTES = 4 * 1024 * 1024  # limit of a chunk that needs as much memory to receive
MOVED_BYTES = 16 * 1024 * 1024  # limit of a chunk that is received in the output itself
_Steps = Iterator["Step | None"]  # of one chunk; None where the next chunk may start


@final
class _Done:
    """A step without work."""

    def wait(self) -> None:
        """Return at once."""


DONE = _Done()


@attrs.frozen(eq=False)
class Levels:
    """Both levels of a group, as this rank sees them."""

    memory: Transport  # to the ranks of this host
    network: Network  # to the ranks of equal index
    layout: HostLayout
    host: int
    index: int
    # receive buffers in bytes, by use; they grow, within bounds
    buffers: dict[Any, Tensor] = attrs.field(factory=dict)
    # of the messages of a collective that may be in flight beside others; empty: it may not
    tags: Iterator[int] = attrs.field(factory=lambda: iter(()))

    def next_tag(self) -> int | None:
        """Return the tag of the collective's next message; None if its messages go in order."""
        return next(self.tags, None)

    @property
    def is_alone(self) -> bool:
        """True if there is one rank on each host."""
        return self.layout.ranks_per_host == 1

    def on_host(self, message: Message) -> Step:
        """Issue a collective of this host's ranks, in place; nothing if this rank is alone on its host."""
        return DONE if self.is_alone else self.memory.issue(message)

    def buffer(self, use: Any, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory to receive in, (numel,); the same memory for the same use."""
        nbytes = numel * dtype.itemsize
        found = self.buffers.get(use)
        if found is None or found.numel() < nbytes:
            found = self.buffers[use] = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        return found[:nbytes].view(dtype)

    def reduce_local(self, sources: Iterable[Tensor], reduction: str, output: Tensor) -> None:
        """Reduce the sources in order into `output`, which may be one of them."""
        ffi, lib = self.memory.library.ffi, self.memory.library.lib
        places = [ffi.cast("void *", source.data_ptr()) for source in sources]
        outputs = ffi.new("void *[]", [ffi.cast("void *", output.data_ptr())])
        code, numel = DTYPES[output.dtype], output.numel()
        lib.zs_reduce(
            code, REDUCTIONS.index(reduction), len(places), ffi.new("void *[]", places), 1, outputs, numel, 0
        )

    def host_slices(self, tensor: Tensor, host: int, start: int, stop: int) -> tuple[Tensor, int]:
        """Columns [start, stop) of the slices of a host's ranks, in a tensor with one slice per rank of the group.

        Returns a view from the first to the last slice, and the stride between slices in elements.
        """
        part = tensor.numel() // (self.layout.num_hosts * self.layout.ranks_per_host)
        ranks = self.layout.hosts[host]
        return tensor[ranks[0] * part + start : ranks[-1] * part + stop], self.layout.stride(host) * part


def spans(numel: int, parts: int, most: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into spans divisible by `parts`, of at most `most` elements per part; the rest is last."""
    width = max(1, most) * parts
    even = numel - numel % parts
    found = [(start, min(start + width, even)) for start in range(0, even, width)]
    return found + ([(even, numel)] if even < numel else [])


def all_reduce(levels: Levels, message: Message) -> Iterator[Step]:
    flat = _flat(message.output)
    cuts = _chunks(flat, levels.layout.ranks_per_host, SUMMED_BYTES)
    yield from _pipelined(_reduce_span(levels, message, flat[a:b], slot % 2) for slot, (a, b) in enumerate(cuts))


def reduce_scatter(levels: Levels, message: Message) -> Iterator[Step]:
    output = _flat(message.output)
    cuts = spans(output.numel(), 1, SUMMED_BYTES // levels.layout.num_hosts // output.element_size())
    yield from _pipelined(_scatter_span(levels, message, a, b, slot % 2) for slot, (a, b) in enumerate(cuts))


def all_gather(levels: Levels, message: Message) -> Iterator[Step]:
    output, input = _flat(message.output), _flat(message.input)
    rank = levels.layout.hosts[levels.host][levels.index]
    own = output[rank * input.numel() : (rank + 1) * input.numel()]
    if own.numel() and own.data_ptr() != input.data_ptr():
        own.copy_(input)
    cuts = spans(input.numel(), 1, MOVED_BYTES // levels.layout.num_hosts // output.element_size())
    yield from _pipelined(_gather_span(levels, message, output, a, b) for a, b in cuts)


def broadcast(levels: Levels, message: Message) -> Iterator[Step]:
    flat = _flat(message.output).view(torch.uint8)
    cuts = _chunks(flat, levels.layout.ranks_per_host, MOVED_BYTES)
    yield from _pipelined(_send_span(levels, message, flat[a:b]) for a, b in cuts)


def barrier(levels: Levels, message: Message) -> Iterator[Step]:
    yield levels.on_host(message)
    yield levels.network.barrier()


COLLECTIVES: dict[str, Callable[[Levels, Message], Iterator[Step]]] = {
    "all_reduce": all_reduce,
    "reduce_scatter": reduce_scatter,
    "all_gather": all_gather,
    "broadcast": broadcast,
    "barrier": barrier,
}


def _pipelined(chunks: Iterable[_Steps]) -> Iterator[Step]:
    """Yield the steps of all chunks: the second part of each after the first part of the next."""
    started: _Steps = iter(())
    for chunk in chunks:
        yield from iter(lambda: next(chunk), None)  # noqa: B023 - used up before the next chunk
        yield from _steps_of(started)
        started = chunk
    yield from _steps_of(started)


def _steps_of(steps: _Steps) -> Iterator[Step]:
    return (step for step in steps if step is not None)


def _reduce_span(levels: Levels, message: Message, span: Tensor, slot: int) -> _Steps:
    """Steps of an all_reduce: a part for each rank of the host or, if too short for that, the whole span on all."""
    parts = levels.layout.ranks_per_host
    reduction, label = message.reduction, message.label
    if span.numel() % parts or span.nbytes <= SMALL_BYTES:
        yield levels.on_host(Message("all_reduce", span, span, reduction, label=label))
        yield from _sum_between_hosts(levels, message, span, slot)
        return
    part = span.numel() // parts
    own = span[levels.index * part : (levels.index + 1) * part]
    yield levels.on_host(Message("reduce_scatter", own, span, reduction, label=label))
    yield from _sum_between_hosts(levels, message, own, slot)
    yield levels.on_host(Message("all_gather", span, own, label=label))


def _sum_between_hosts(levels: Levels, message: Message, piece: Tensor, slot: int) -> _Steps:
    """Sum the pieces of all hosts, on each of them."""
    reduction, host, num_hosts = message.reduction or "", levels.host, levels.layout.num_hosts
    if piece.nbytes <= (FEW_BYTES if num_hosts == 2 else SMALL_BYTES):
        rows = list(levels.buffer(slot, (num_hosts - 1) * piece.numel(), piece.dtype).view(num_hosts - 1, -1))
        rows.insert(host, piece)
        work: Step = levels.network.gather(rows, levels.next_tag())
        yield None
        yield work
        levels.reduce_local(rows, reduction, piece)
        return
    shares = [piece[a:b] for a, b in _shares(piece.numel(), num_hosts)]
    received = levels.buffer(slot, num_hosts * shares[host].numel(), piece.dtype).view(num_hosts, -1)
    work = levels.network.exchange(received, shares, levels.next_tag())
    yield None
    yield work
    levels.reduce_local([*received[:host], shares[host], *received[host + 1 :]], reduction, shares[host])
    yield levels.network.gather(shares, levels.next_tag())


def _scatter_span(levels: Levels, message: Message, start: int, stop: int, slot: int) -> _Steps:
    """Steps of a reduce_scatter: columns [start, stop) of all slices."""
    output, input = _flat(message.output), _flat(message.input)
    num_hosts, host, width = levels.layout.num_hosts, levels.host, stop - start
    received = levels.buffer(slot, num_hosts * width, output.dtype).view(num_hosts, width)
    slices = [levels.host_slices(input, each, start, stop) for each in range(num_hosts)]
    pieces = [columns for columns, _ in slices]
    if not levels.is_alone:
        pieces = list(levels.buffer(("sent", slot), num_hosts * width, output.dtype).view(num_hosts, width))
        for piece, (columns, stride) in zip(pieces, slices):
            yield levels.on_host(
                Message("reduce_scatter", piece, columns, message.reduction, label=message.label, stride=stride)
            )
    work = levels.network.exchange(received, pieces, levels.next_tag())
    yield None
    yield work
    sources = [*received[:host], pieces[host], *received[host + 1 :]]
    levels.reduce_local(sources, message.reduction or "", output[start:stop])


def _gather_span(levels: Levels, message: Message, output: Tensor, start: int, stop: int) -> _Steps:
    """Steps of an all_gather: columns [start, stop) of all slices."""
    columns = [levels.host_slices(output, host, start, stop) for host in range(levels.layout.num_hosts)]
    own = [slices[levels.index * stride :][: stop - start] for slices, stride in columns]

    def here(host: int) -> Step:
        slices, stride = columns[host]
        return levels.on_host(Message("all_gather", slices, own[host], label=message.label, stride=stride))

    work = levels.network.gather(own, levels.next_tag())
    yield here(levels.host)
    yield None
    yield work
    for host in range(levels.layout.num_hosts):
        if host != levels.host:
            yield here(host)


def _send_span(levels: Levels, message: Message, span: Tensor) -> _Steps:
    """Steps of a broadcast of bytes."""
    source_host, source_index = levels.layout.locate(message.source)
    parts, network, label = levels.layout.ranks_per_host, levels.network, message.label
    here = Message("broadcast", span, span, source=source_index, label=label)
    if span.numel() % parts or span.nbytes <= SMALL_BYTES:
        if levels.index == source_index:
            yield network.broadcast(span, source_host)
        yield levels.on_host(here)
        return
    part = span.numel() // parts
    own = span[levels.index * part : (levels.index + 1) * part]
    if levels.host == source_host:
        yield levels.on_host(here)
    work = network.broadcast(own, source_host)
    yield None
    yield work
    if levels.host != source_host:
        yield levels.on_host(Message("all_gather", span, own, label=label))


def _chunks(flat: Tensor, parts: int, most_bytes: int) -> list[tuple[int, int]]:
    """Cut a tensor into spans of which each rank of a host carries a part; small tensors stay whole."""
    if 0 < flat.nbytes <= SMALL_BYTES:
        return [(0, flat.numel())]
    return spans(flat.numel(), parts, most_bytes // flat.element_size())


def _shares(numel: int, parts: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into `parts` intervals of nearly equal length."""
    return [(numel * part // parts, numel * (part + 1) // parts) for part in range(parts)]


def _flat(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "only a barrier has no tensor"
    return tensor.detach().view(-1)
