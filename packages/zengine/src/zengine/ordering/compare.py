"""Comparison of the operations that ranks launched.

Four rules, each of which NCCL demands:

1. The members of a communicator launch the same collectives over it, in one order: operation, bytes, dtype, reduction
   or sender.
2. A rank sends another what that one receives, in one order.
3. Ranks that share several communicators launch what belongs to these in one order: a kernel of one communicator may
   wait on one rank for a kernel of the other, which waits on a second rank for the first.
4. No larger circle of ranks waits in this way: if every rank finishes what it launches before it launches more, the
   run comes to its end.  Examined if the other rules hold.

Groups on the host (Gloo) have threads of their own and no kernels; rules 3 and 4 leave them out.  Labels of zcomm's
calls count, too: they are equal on all ranks, and tell apart two buckets of one size.  A breach is reported once for
each pair of launching lines, with the first ranks and the position.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import attrs

from zcomm import Communicator, PlayedCall

__all__ = ["Disagreement", "disagreements"]

Launches = Mapping[int, Sequence[PlayedCall]]  # rank -> in order of launch

_ANY_SIZE = "of unequal slices"  # operations whose bytes differ between ranks


@attrs.frozen(kw_only=True)
class Disagreement:
    """Two ranks that do not launch the same."""

    rule: str  # "collectives", "messages", "order" or "circle"
    communicators: tuple[Communicator, ...]
    ranks: tuple[int, int]
    position: int  # from 0: in the communicator, or for "order" among the operations of all `communicators`
    calls: tuple[PlayedCall | None, PlayedCall | None]  # None: the rank launches no more

    @property
    def key(self) -> tuple[str, str, str]:
        """The rule and both places, "file.py function", in alphabetic order: equal for repetitions."""
        first, second = sorted(_place(call) for call in self.calls)
        return self.rule, first, second

    def __str__(self) -> str:
        where = " and ".join(map(str, self.communicators))
        shown = "\n".join(
            f"  rank {rank}: {'launches no more' if call is None else _shown(call)}"
            for rank, call in zip(self.ranks, self.calls)
        )
        return f"{_RULES[self.rule]} {where}: operation {self.position} differs\n{shown}"


_RULES = {
    "collectives": "collectives of",
    "messages": "messages in",
    "order": "the order between",
    "circle": "ranks wait for each other in a circle, over",
}


def disagreements(launches: Launches, failed: Collection[int] = ()) -> Iterator[Disagreement]:
    """Yield each breach of the rules among these ranks, one for each pair of places.

    failed: ranks that raised an error, and so launch no more.
    """
    seen: set[tuple[str, str, str]] = set()
    pairwise = itertools.chain(_collectives(launches), _messages(launches), _orders(launches))
    for found in itertools.chain(pairwise, _circle(launches, lambda: not seen)):
        is_cut = any(call is None and rank in failed for rank, call in zip(found.ranks, found.calls))
        if not is_cut and found.key not in seen:
            seen.add(found.key)
            yield found


def _collectives(launches: Launches) -> Iterator[Disagreement]:
    """Rule 1."""
    sequences: dict[Communicator, dict[int, list[PlayedCall]]] = defaultdict(lambda: defaultdict(list))
    for rank, calls in launches.items():
        for call in calls:
            if call.source < 0:
                sequences[call.communicator][rank].append(call)
    for communicator, by_rank in sequences.items():
        members = [rank for rank in communicator.ranks if rank in launches]
        for other in members[1:]:
            pair = members[0], other
            yield from _first("collectives", (communicator,), pair, (by_rank[pair[0]], by_rank[other]), _signature)


def _messages(launches: Launches) -> Iterator[Disagreement]:
    """Rule 2."""
    ends: dict[tuple[Communicator, int, int], dict[str, list[PlayedCall]]] = defaultdict(
        lambda: {"send": [], "recv": []}
    )
    for calls in launches.values():
        for call in calls:
            if call.source >= 0:
                ranks = call.communicator.ranks
                ends[call.communicator, ranks[call.source], ranks[call.target]][call.op].append(call)
    for (communicator, source, target), both in ends.items():
        if source in launches and target in launches:
            sides = both["send"], both["recv"]
            yield from _first("messages", (communicator,), (source, target), sides, _message)


def _orders(launches: Launches) -> Iterator[Disagreement]:
    """Rule 3."""
    device = {rank: _on_device(calls) for rank, calls in launches.items()}
    used = {rank: frozenset(call.communicator for call in calls) for rank, calls in device.items()}
    cut: dict[tuple[int, Two], list[PlayedCall]] = {}

    def of(rank: int, both: Two) -> list[PlayedCall]:
        if (rank, both) not in cut:
            cut[rank, both] = [call for call in device[rank] if call.communicator in both]
        return cut[rank, both]

    for pair in itertools.combinations(launches, 2):
        shared = sorted(used[pair[0]] & used[pair[1]], key=lambda each: (each.ranks, each.number))
        for both in itertools.combinations(shared, 2):
            first, second = ([call for call in of(rank, both) if _concerns(call, pair)] for rank in pair)
            yield from _first("order", both, pair, (first, second), lambda call: (call.communicator, _ends(call)))


Two = tuple[Communicator, Communicator]


def _on_device(calls: Sequence[PlayedCall]) -> list[PlayedCall]:
    return [call for call in calls if not call.communicator.is_on_host]


def _circle(launches: Launches, is_due: Callable[[], bool]) -> Iterator[Disagreement]:
    """Rule 4: let all ranks proceed, each operation when all its ranks have come to it."""
    if not is_due():
        return
    left = {rank: deque(_on_device(calls)) for rank, calls in launches.items()}
    ready = deque(left)
    while ready:
        rank = ready.popleft()
        while left[rank] and not _missing(left, rank):
            together = _members(left[rank][0], launches)
            for each in together:
                left[each].popleft()
            ready.extend(each for each in together if each != rank)
    stuck = [rank for rank, calls in left.items() if calls]
    if not stuck:
        return
    path = [stuck[0]]
    while (late := _missing(left, path[-1])) and late[0] not in path:
        path.append(late[0])
    circle = path[path.index(late[0]) :] if late else path
    first, second = circle[0], circle[1 % len(circle)]
    calls = left[first][0], left[second][0] if left[second] else None
    named = tuple(call.communicator for call in calls if call is not None)
    position = len(_on_device(launches[first])) - len(left[first])
    yield Disagreement(rule="circle", communicators=named, ranks=(first, second), position=position, calls=calls)


def _members(call: PlayedCall, launches: Mapping[int, object]) -> list[int]:
    """Return the played ranks of an operation."""
    ranks = call.communicator.ranks
    all_ranks = ranks if call.source < 0 else (ranks[call.source], ranks[call.target])
    return [rank for rank in all_ranks if rank in launches]


def _missing(left: Mapping[int, deque[PlayedCall]], rank: int) -> list[int]:
    """Return the ranks for which the next operation of `rank` waits."""
    if not left[rank]:
        return []
    call = left[rank][0]
    mine = call.communicator, _ends(call)
    others = ((other, left[other]) for other in _members(call, left))
    return [other for other, calls in others if not calls or (calls[0].communicator, _ends(calls[0])) != mine]


def _first(
    rule: str,
    communicators: tuple[Communicator, ...],
    pair: tuple[int, int],
    sides: tuple[Sequence[PlayedCall], Sequence[PlayedCall]],
    of: Callable[[PlayedCall], object],
) -> Iterator[Disagreement]:
    """Yield the first difference of two sequences, if there is one."""
    for position, (mine, theirs) in enumerate(itertools.zip_longest(*sides)):
        if mine is None or theirs is None or of(mine) != of(theirs):
            yield Disagreement(
                rule=rule, communicators=communicators, ranks=pair, position=position, calls=(mine, theirs)
            )
            return


def _signature(call: PlayedCall) -> tuple[str, int, str, str, str]:
    nbytes = 0 if _ANY_SIZE in call.op else call.nbytes
    return call.op, nbytes, call.dtype, call.detail, call.label


def _message(call: PlayedCall) -> tuple[int, str]:
    return call.nbytes, call.dtype


def _ends(call: PlayedCall) -> tuple[int, int]:
    return call.source, call.target


def _concerns(call: PlayedCall, pair: tuple[int, int]) -> bool:
    """Return whether both ranks take part in an operation of a communicator that they share."""
    if call.source < 0:
        return True
    ranks = call.communicator.ranks
    return {ranks[call.source], ranks[call.target]} == set(pair)


def _place(call: PlayedCall | None) -> str:
    """Return "file.py function" of a launching line, without the number, which changes often."""
    if call is None:
        return "the end"
    path, _, rest = call.line.partition(":")
    return f"{_short(path)} {rest.rpartition(' ')[2]}"


def _short(path: str) -> str:
    return path.rpartition("/src/")[2]


def _shown(call: PlayedCall) -> str:
    ends = f" from rank {call.communicator.ranks[call.source]} to {call.communicator.ranks[call.target]}"
    words = [
        f"{call.op}{ends if call.source >= 0 else ''}",
        f"{call.label!r}" if call.label else "",
        f"of {call.nbytes} bytes of {call.dtype}" if call.dtype else "",
        f"({call.detail})" if call.detail else "",
        f"over {call.communicator}, at {call.line}",
        "" if call.thread == "MainThread" else f"on thread {call.thread}",
    ]
    return " ".join(word for word in words if word)
