"""Ranks as threads of one process, with an exchange in memory."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from typing import Generic, TypeVar, final

import attrs

from zckpt.format import canonical
from zckpt.format.canonical import JSON
from zckpt.ranks import Peers

T = TypeVar("T")


@attrs.frozen(eq=False)
class Outcome(Generic[T]):
    """Result of one rank: a value or an error."""

    value: T | None
    error: BaseException | None


@final
@attrs.define(eq=False)
class _Hub:
    """Rendezvous of the ranks.  Each exchange has its own round, so ranks that leave early do not interfere."""

    world_size: int
    timeout_s: float
    rounds: dict[int, dict[int, bytes]] = attrs.field(factory=lambda: defaultdict(dict))  # round -> rank -> value
    ended: set[int] = attrs.field(factory=set)  # ranks whose function has ended
    changed: threading.Condition = attrs.field(factory=threading.Condition)

    def meet(self, number: int, rank: int, value: bytes) -> list[bytes]:
        with self.changed:
            here = self.rounds[number]
            here[rank] = value
            self.changed.notify_all()
            self.changed.wait_for(lambda: len(here) == self.world_size or self.ended - set(here), self.timeout_s)
            if len(here) < self.world_size:
                absent = sorted(set(range(self.world_size)) - set(here))
                raise ConnectionError(f"rank {absent} did not come to exchange {number}")
            return [here[each] for each in range(self.world_size)]

    def leave(self, rank: int) -> None:
        with self.changed:
            self.ended.add(rank)
            self.changed.notify_all()


@final
@attrs.define(eq=False)
class _ThreadPeers:
    rank: int
    world_size: int
    hub: _Hub
    round: int = 0

    def exchange(self, value: JSON) -> list[JSON]:
        self.round += 1
        return [canonical.load(each) for each in self.hub.meet(self.round, self.rank, canonical.dump(value))]


def run_threads(fn: Callable[[Peers], T], world_size: int, *, timeout_s: float = 30.0) -> list[Outcome[T]]:
    """Run `fn(peers)` as each rank of a world; return the outcomes in rank order.

    A rank that ends early, by an error or by returning, looks like a dead process to the others: the exchange that
    they wait in raises ConnectionError at once.
    """
    hub = _Hub(world_size, timeout_s)
    outcomes: list[Outcome[T]] = [Outcome(None, TimeoutError("did not end"))] * world_size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = Outcome(fn(_ThreadPeers(rank, world_size, hub)), None)
        except BaseException as error:
            outcomes[rank] = Outcome(None, error)
        finally:
            hub.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout_s)
    return outcomes
