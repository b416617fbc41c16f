"""Answers to the operations of a played rank, from what the other played ranks have sent.

What a rank sends is known (names, shapes, counts that no value decides) or unknown.  Known contributions are kept. An
operation whose contributions are all known is answered with them: gathered, broadcast, summed.  A rank that is not
played contributes what the first played member of the communicator does; before that one has been played, what the
playing rank does itself.  So the ranks are played again until no contribution changes: then they have had the same
answers, as in a run.  Anything else has unknown values, see `unknown.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zcomm import Communicator, PlayedCall
from zengine.ordering.unknown import UnknownValues

__all__ = ["Board", "Replies"]

_LARGEST = 1 << 22  # bytes of a contribution that is kept
_GATHERS, _SUMS = ("allgather", "broadcast", "alltoall"), ("allreduce",)
_REDUCTIONS: Mapping[str, Any] = {"sum": torch.sum, "max": torch.amax, "min": torch.amin}

# A communicator, the number of an operation in it, operation, dtype and label, and a rank.  A rank that launches
# another operation there contributes nothing to this one.
Place = tuple[Communicator, int, str, str, str, int]


@final
class Board:
    """Contributions of the ranks."""

    def __init__(self) -> None:
        self._kept: dict[Place, list[Tensor] | None] = {}  # None: unknown values
        self.has_changed = False  # since `begin`

    def begin(self) -> None:
        """Begin to play all ranks once more."""
        self.has_changed = False

    def post(self, place: Place, sent: Sequence[Tensor] | None) -> None:
        """Keep what a rank sends; None: unknown values."""
        if place not in self._kept or not _is_same(self._kept[place], sent):
            self.has_changed = True
        self._kept[place] = None if sent is None else [tensor.detach().clone() for tensor in sent]

    def find(self, place: Place) -> list[Tensor] | None:
        """Return what a rank sends; None if it has not been played, or the values are unknown."""
        return self._kept.get(place)

    def of_all(self, call: PlayedCall, number: int, own: Sequence[Tensor]) -> Contributions | None:
        """Return the contributions of all ranks of an operation; None if some are unknown."""
        kept: dict[int, Tensor] = {}
        for index, rank in enumerate(call.communicator.ranks):
            place = place_of(call, number, rank)
            found = self._kept.get(place)
            if found is not None:
                kept[index] = _flat(found)
            elif place in self._kept:
                return None
        return Contributions(len(call.communicator.ranks), next(iter(kept.values()), _flat(own)), kept)


def place_of(call: PlayedCall, number: int, rank: int) -> Place:
    """Return the place of what `rank` contributes to an operation."""
    return call.communicator, number, call.op, call.dtype, call.label, rank


@attrs.frozen(eq=False)
class Contributions:
    """What the ranks of an operation send, flat."""

    num_ranks: int
    usual: Tensor  # by ranks that are not played
    kept: Mapping[int, Tensor]  # by others, by their rank in the communicator

    def table(self, width: int, start: int = 0) -> Tensor:
        """Return (ranks, width): elements from `start` on, with zeros where there are fewer."""
        found = _padded(self.usual[start:], width).expand(self.num_ranks, -1).clone()
        for index, each in self.kept.items():
            found[index] = _padded(each[start:], width)
        return found


@final
class Replies:
    """Answers the operations of one rank; see the module."""

    def __init__(self, values: UnknownValues, board: Board, rank: int) -> None:
        self._values, self._board, self._rank = values, board, rank
        self._numbers: Counter[Any] = Counter()  # operations, by communicator and ends

    def answer(self, call: PlayedCall, results: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """Fill `results`."""
        number = self._numbers[call.communicator, call.source, call.target]
        self._numbers[call.communicator, call.source, call.target] += 1
        with self._values.computing():
            if call.source >= 0:
                is_known = self._message(call, number, results, sent)
            else:
                is_known = self._collective(call, number, results, sent)
        for result in () if is_known else results:
            self._values.mark(result)

    def _message(self, call: PlayedCall, number: int, results: Sequence[Tensor], sent: Sequence[Tensor]) -> bool:
        ranks = call.communicator.ranks
        # messages between two ranks are numbered by themselves
        edge = Communicator((ranks[call.source], ranks[call.target]), call.communicator.number)
        place = (edge, number, "message", call.dtype, "", -1)
        if call.op == "send":
            self._board.post(place, sent if self._is_known(sent) else None)
            return True
        found = self._board.find(place)
        if found is None or not _are_alike(found, results):
            return False
        for result, each in zip(results, found):
            result.copy_(each)
            self._values.unmark(result)
        return True

    def _collective(self, call: PlayedCall, number: int, results: Sequence[Tensor], sent: Sequence[Tensor]) -> bool:
        if call.op not in _GATHERS + _SUMS or not results:
            return not results
        is_known, communicator = self._is_known(sent), call.communicator
        self._board.post(place_of(call, number, self._rank), sent if is_known else None)
        everyone = self._board.of_all(call, number, sent) if is_known else None
        if everyone is None:
            return False
        width = results[0].numel()
        if call.op in _SUMS:
            table = everyone.table(width)
            results[0].view(-1).copy_(_REDUCTIONS.get(call.detail, torch.sum)(table, dim=0))
        elif call.op == "broadcast":
            sender = everyone.kept.get(int(call.detail.rpartition(" ")[2]), everyone.usual)
            results[0].view(-1).copy_(_padded(sender, width))
        else:
            width = width if len(results) > 1 else width // everyone.num_ranks
            start = communicator.ranks.index(self._rank) * width if call.op == "alltoall" else 0
            table = everyone.table(width, start)
            for result, rows in zip(results, table.chunk(len(results))):
                result.view(-1).copy_(rows.reshape(-1))
        for result in results:
            self._values.unmark(result)
        return True

    def _is_known(self, sent: Sequence[Tensor]) -> bool:
        """Return whether contributions may be kept: no values, even where a rank has none and sends zeros."""
        if any(each.is_floating_point() for each in sent):
            return False
        return sum(each.nbytes for each in sent) <= _LARGEST and not any(map(self._values.is_unknown, sent))


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _padded(flat: Tensor, width: int) -> Tensor:
    """Return the first `width` elements, with zeros where there are fewer."""
    return flat[:width] if flat.numel() >= width else torch.nn.functional.pad(flat, (0, width - flat.numel()))


def _are_alike(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return [(each.numel(), each.dtype) for each in first] == [(each.numel(), each.dtype) for each in second]


def _is_same(before: Sequence[Tensor] | None, sent: Sequence[Tensor] | None) -> bool:
    if before is None or sent is None:
        return before is sent
    return _are_equal(before, sent)


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether the values are equal; texts are padded to the longest of all ranks, known or not."""
    if len(first) == len(second) == 1 and first[0].dtype == second[0].dtype == torch.uint8:
        width = max(first[0].numel(), second[0].numel())
        return torch.equal(_padded(first[0].reshape(-1), width), _padded(second[0].reshape(-1), width))
    return _are_alike(first, second) and all(torch.equal(a.reshape(-1), b.reshape(-1)) for a, b in zip(first, second))
