"""Replay of a recorded program: are all accesses to memory ordered, under every schedule of a GPU?

A record is a list of entries, each a list that begins with its kind:

    ["launch", stream, name, reads, writes]   work on a stream; reads and writes are [low, high) of addresses
    ["host", name, reads, writes]             the host itself, on pinned memory
    ["allocate", stream, low, high]           memory comes from the allocator; stream -1: pinned memory
    ["use", stream, low, high]                record_stream: the allocator knows of this stream
    ["record", stream, event]
    ["wait", stream, event]                   the stream waits for the event
    ["wait host", event], ["wait stream", stream], ["wait all"]   the host waits

Streams, events and addresses are numbers.  Clocks are vectors over the actors, which are the host (-1) and the
streams.  A launch hands the host's clock to its stream, an event carries its stream's clock, and a wait joins clocks.
Two accesses to the same bytes, one of them a write, are ordered if the later actor's clock covers the earlier access.
Memory that is allocated again must be free of accesses that the allocator does not know of.  It is written anew from
the rules of simulated_cuda/csrc/machine.h, which runs only on the simulated device, and so checks it, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

__all__ = ["WAITS", "Entry", "needed_waits", "violations"]

Entry = Sequence[Any]
Range = Sequence[int]
HOST = -1
WAITS = frozenset({"wait", "wait host", "wait stream", "wait all", "use"})  # what a record can lack


@attrs.frozen
class _Access:
    low: int
    high: int
    actor: int
    time: int
    writes: bool
    name: str


@attrs.define(eq=False)
class _Replay:
    """State of a replay."""

    clocks: dict[int, dict[int, int]] = attrs.field(factory=lambda: {HOST: {}})
    events: dict[int, dict[int, int]] = attrs.field(factory=dict)
    accesses: list[_Access] = attrs.field(factory=list)  # those that a later one may still conflict with
    used: dict[tuple[int, int], set[int]] = attrs.field(factory=dict)  # streams by (low, high) of record_stream
    found: dict[str, None] = attrs.field(factory=dict)  # violations, each once, in order

    def clock(self, actor: int) -> dict[int, int]:
        return self.clocks.setdefault(actor, dict(self.clocks[HOST]))

    def tick(self, actor: int) -> int:
        clock = self.clock(actor)
        clock[actor] = clock.get(actor, 0) + 1
        return clock[actor]

    def join(self, actor: int, other: Mapping[int, int]) -> None:
        clock = self.clock(actor)
        for each, time in other.items():
            clock[each] = max(clock.get(each, 0), time)

    def launch(self, stream: int, name: str, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        self.join(stream, self.clocks[HOST])
        self.touch(stream, name, reads, writes)

    def host(self, name: str, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        self.touch(HOST, name, reads, writes)

    def touch(self, actor: int, name: str, reads: Sequence[Range], writes: Sequence[Range]) -> None:
        time = self.tick(actor)
        for ranges, is_write in ((reads, False), (writes, True)):
            for low, high in ranges:
                self.access(_Access(low, high, actor, time, is_write, name))

    def access(self, new: _Access) -> None:
        clock, kept = self.clock(new.actor), []
        for old in self.accesses:
            meets = old.low < new.high and new.low < old.high
            ordered = clock.get(old.actor, 0) >= old.time
            if meets and not ordered and (new.writes or old.writes):
                self.violation(new, old)
            inside = new.low <= old.low and old.high <= new.high
            if not (meets and inside and ordered and (new.writes or (not old.writes and old.actor == new.actor))):
                kept.append(old)
        self.accesses = [*kept, new]

    def allocate(self, stream: int, low: int, high: int) -> None:
        """Drop the accesses to memory that is handed out again; its allocator orders those that it knows of."""
        if stream != HOST:
            self.join(stream, self.clocks[HOST])
        clock, kept = self.clock(stream), []
        for old in self.accesses:
            if not (old.low < high and low < old.high):
                kept.append(old)
            elif stream != HOST and old.actor not in (HOST, stream) and clock.get(old.actor, 0) < old.time:
                known = any(
                    old.actor in streams and first < old.high and old.low < last
                    for (first, last), streams in self.used.items()
                )
                if not known:
                    self.note(f"memory is freed while {old.name} on {_name(old.actor)} uses it: call record_stream")
        self.accesses = kept
        self.used = {span: streams for span, streams in self.used.items() if not (span[0] < high and low < span[1])}
        if stream != HOST:
            self.touch(stream, "an allocation", [], [(low, high)])

    def use(self, stream: int, low: int, high: int) -> None:
        self.used.setdefault((low, high), set()).add(stream)

    def record(self, stream: int, event: int) -> None:
        self.join(stream, self.clocks[HOST])
        self.tick(stream)
        self.events[event] = dict(self.clock(stream))

    def wait(self, stream: int, event: int) -> None:
        self.join(stream, self.events.get(event, {}))

    def wait_host(self, event: int) -> None:
        self.join(HOST, self.events.get(event, {}))

    def wait_stream(self, stream: int) -> None:
        self.join(HOST, self.clock(stream))

    def wait_all(self) -> None:
        for clock in list(self.clocks.values()):
            self.join(HOST, clock)

    def violation(self, new: _Access, old: _Access) -> None:
        verbs = ("reads", "writes")
        self.note(
            f"{new.name} on {_name(new.actor)} {verbs[new.writes]} memory that {old.name} on {_name(old.actor)} "
            f"{verbs[old.writes]}, and nothing orders the two"
        )

    def note(self, text: str) -> None:
        self.found[text] = None


def violations(entries: Sequence[Entry]) -> list[str]:
    """Return the accesses that nothing orders.  Raises ValueError for an entry of an unknown kind."""
    replay = _Replay()
    kinds: dict[str, Callable[..., None]] = {
        "launch": replay.launch,
        "host": replay.host,
        "allocate": replay.allocate,
        "use": replay.use,
        "record": replay.record,
        "wait": replay.wait,
        "wait host": replay.wait_host,
        "wait stream": replay.wait_stream,
        "wait all": replay.wait_all,
    }
    for number, (kind, *rest) in enumerate(entries):
        if kind not in kinds:
            raise ValueError(f"entry {number} is of kind {kind!r}; allowed: {', '.join(kinds)}")
        kinds[kind](*rest)
    return list(replay.found)


def needed_waits(entries: Sequence[Entry]) -> tuple[int, int]:
    """Return how many of the waits show a violation if they alone are missing, and how many waits there are."""
    places = [index for index, (kind, *_) in enumerate(entries) if kind in WAITS]
    needed = sum(bool(violations([*entries[:index], *entries[index + 1 :]])) for index in places)
    return needed, len(places)


def _name(actor: int) -> str:
    return "the host" if actor == HOST else "the default stream" if actor == 0 else f"stream {actor}"
