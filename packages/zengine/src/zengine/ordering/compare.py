"""Comparison of the operations that ranks launched.

Four rules, each of which NCCL demands:

1. The members of a communicator launch the same collectives over it, in one order: operation, bytes, dtype, reduction
   or sender.
2. A rank sends another what that one receives, in one order.
3. Two ranks launch what both take part in, messages between them and collectives, in one order over all
   communicators: the kernel of one launch may wait on one rank for that of another, which waits on the second rank
   for the first.
4. No larger circle of ranks waits in this way: if every rank finishes what it launches before it launches more, the
   run comes to its end.  Examined if the other rules hold.

Messages of one `batch_isend_irecv` are one launch: their order counts between two ranks in one direction, where NCCL
matches them by it (rule 2), and nowhere else.

Groups on the host (Gloo) have threads of their own and no kernels; rules 3 and 4 leave them out.  Labels of zcomm's
calls count, too: they are equal on all ranks, and tell apart two buckets of one size.  A breach is reported once for
each pair of launching lines, with the first ranks and the position.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar, final

import attrs

from zcomm import Communicator, PlayedCall

__all__ = ["Disagreement", "disagreements"]

T = TypeVar("T")
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
            yield from _first(
                "collectives", (communicator,), pair, (by_rank[pair[0]], by_rank[other]), _signature, _itself
            )


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
            yield from _first("messages", (communicator,), (source, target), sides, _message, _itself)


def _orders(launches: Launches) -> Iterator[Disagreement]:
    """Rule 3."""
    device = {rank: _on_device(calls) for rank, calls in launches.items()}
    used = {rank: frozenset(call.communicator for call in calls) for rank, calls in device.items()}
    has_messages = {call.communicator for calls in device.values() for call in calls if call.source >= 0}
    cut: dict[tuple[int, Two], list[PlayedCall]] = {}

    def of(rank: int, both: Two) -> list[PlayedCall]:
        if (rank, both) not in cut:
            cut[rank, both] = [call for call in device[rank] if call.communicator in both]
        return cut[rank, both]

    for pair in itertools.combinations(launches, 2):
        shared = sorted(used[pair[0]] & used[pair[1]], key=lambda each: (each.ranks, each.number))
        alone = ((each, each) for each in shared if each in has_messages)
        for both in itertools.chain(alone, itertools.combinations(shared, 2)):
            first, second = (_merged([call for call in of(rank, both) if _concerns(call, pair)]) for rank in pair)
            if _conflict(first, second):
                yield from _first("order", tuple(dict.fromkeys(both)), pair, (first, second), _parts, _call_of)


Two = tuple[Communicator, Communicator]
Part = tuple[Communicator, int, int]  # and the ends of a message, or -1
Numbered = tuple[Part, int]  # an operation: its number among those of the same part, from 1


def _on_device(calls: Sequence[PlayedCall]) -> list[PlayedCall]:
    return [call for call in calls if not call.communicator.is_on_host]


def _merged(calls: Iterable[PlayedCall]) -> list[list[PlayedCall]]:
    """Return the operations of each launch; a number of 0 is no launch of several."""
    found: dict[int, list[PlayedCall]] = {}
    for position, call in enumerate(calls):
        found.setdefault(call.launch or ~position, []).append(call)
    return list(found.values())


def _part(call: PlayedCall) -> Part:
    return call.communicator, call.source, call.target


def _conflict(first: Sequence[Sequence[PlayedCall]], second: Sequence[Sequence[PlayedCall]]) -> bool:
    """Return whether two ranks do not launch the same, or two operations in opposite orders."""
    place = {each: position for position, operations in enumerate(_numbered(second)) for each in operations}
    furthest = -1
    for operations in _numbered(first):
        found = [place.pop(each, -1) for each in operations]
        if min(found) < max(furthest, 0):
            return True
        furthest = max(furthest, *found)
    return bool(place)


def _numbered(launches: Sequence[Sequence[PlayedCall]]) -> Iterator[list[Numbered]]:
    """Yield the operations of each launch, numbered among those of the same ends."""
    seen: Counter[Part] = Counter()
    for calls in launches:
        numbered = []
        for part in map(_part, calls):
            seen[part] += 1
            numbered.append((part, seen[part]))
        yield numbered


def _parts(calls: Sequence[PlayedCall]) -> Counter[Part]:
    return Counter(map(_part, calls))


def _call_of(calls: Sequence[PlayedCall]) -> PlayedCall:
    return calls[0]


def _itself(call: PlayedCall) -> PlayedCall:
    return call


def _circle(launches: Launches, is_due: Callable[[], bool]) -> Iterator[Disagreement]:
    """Rule 4: let all ranks proceed, each launch when all ranks of its operations have come to them."""
    if not is_due():
        return
    state = _Proceeding(launches)
    state.run()
    stuck = [rank for rank, left in state.left.items() if left]
    if not stuck:
        return
    path = [stuck[0]]
    while (late := state.missing(path[-1])) and late[0] not in path:
        path.append(late[0])
    circle = path[path.index(late[0]) :] if late else path
    first, second = circle[0], circle[1 % len(circle)]
    calls = state.left[first][0][0], state.left[second][0][0] if state.left[second] else None
    named = tuple(call.communicator for call in calls if call is not None)
    position = len(_merged(_on_device(launches[first]))) - len(state.left[first])
    yield Disagreement(rule="circle", communicators=named, ranks=(first, second), position=position, calls=calls)


@final
class _Proceeding:
    """Ranks that each finish a launch before the next one.

    An operation is complete when all its played ranks have begun it; which one of several with the same ends it is,
    is its number on each of these ranks.
    """

    def __init__(self, launches: Launches) -> None:
        self.left = {rank: deque(_merged(_on_device(calls))) for rank, calls in launches.items()}
        self._numbered = {rank: _numbered(tuple(left)) for rank, left in self.left.items()}
        self._awaited: dict[int, list[Numbered]] = {}  # of the first launch left
        self._begun: dict[Numbered, set[int]] = defaultdict(set)  # ranks
        self._members: dict[Part, list[int]] = {}  # played ranks

    def run(self) -> None:
        """Proceed until no rank can."""
        for rank in self.left:
            self._begin(rank)
        ready = deque(self.left)
        while ready:
            rank = ready.popleft()
            while self.left[rank] and not self._incomplete(rank):
                self.left[rank].popleft()
                self._begin(rank)
                complete = (each for each in self._awaited[rank] if self._is_complete(each))
                ready.extend(other for part, _ in complete for other in self.members(part) if other != rank)

    def missing(self, rank: int) -> list[int]:
        """Return the ranks for which the first launch left of `rank` waits."""
        awaited = self._incomplete(rank)
        return [other for each in awaited for other in self.members(each[0]) if other not in self._begun[each]]

    def members(self, part: Part) -> list[int]:
        """Return the played ranks of operations."""
        if part not in self._members:
            communicator, source, target = part
            ranks = communicator.ranks
            all_ranks = ranks if source < 0 else (ranks[source], ranks[target])
            self._members[part] = [rank for rank in dict.fromkeys(all_ranks) if rank in self.left]
        return self._members[part]

    def _begin(self, rank: int) -> None:
        """Begin the first launch left."""
        self._awaited[rank] = next(self._numbered[rank], [])
        for each in self._awaited[rank]:
            self._begun[each].add(rank)

    def _incomplete(self, rank: int) -> list[Numbered]:
        return [each for each in self._awaited[rank] if not self._is_complete(each)]

    def _is_complete(self, operation: Numbered) -> bool:
        return len(self._begun[operation]) == len(self.members(operation[0]))


def _first(
    rule: str,
    communicators: tuple[Communicator, ...],
    pair: tuple[int, int],
    sides: tuple[Sequence[T], Sequence[T]],
    of: Callable[[T], object],
    call_of: Callable[[T], PlayedCall],
) -> Iterator[Disagreement]:
    """Yield the first difference of two sequences, if there is one."""
    for position, (mine, theirs) in enumerate(itertools.zip_longest(*sides)):
        if mine is None or theirs is None or of(mine) != of(theirs):
            calls = None if mine is None else call_of(mine), None if theirs is None else call_of(theirs)
            yield Disagreement(rule=rule, communicators=communicators, ranks=pair, position=position, calls=calls)
            return


def _signature(call: PlayedCall) -> tuple[str, int, str, str, str]:
    nbytes = 0 if _ANY_SIZE in call.op else call.nbytes
    return call.op, nbytes, call.dtype, call.detail, call.label


def _message(call: PlayedCall) -> tuple[int, str]:
    return call.nbytes, call.dtype


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
