"""The check of a run: play its ranks, compare what they launch, and report."""

from __future__ import annotations

import time

import attrs

from zengine.ordering.compare import Disagreement, disagreements
from zengine.ordering.play import Play, Played, PlayedRun
from zengine.ordering.ranks import ranks_to_play

__all__ = ["Checked", "check"]

_MOST_ROUNDS = 6  # of playing all ranks until their answers settle


@attrs.frozen(kw_only=True)
class Checked:
    """Result of a check."""

    world_size: int
    played: tuple[int, ...]  # ranks
    launches: int  # operations of all played ranks, in the last round
    communicators: int
    rounds: int
    is_settled: bool  # no rank would be answered otherwise in one more round
    found: tuple[Disagreement, ...]
    seconds: float

    def text(self) -> str:
        """Return the report."""
        head = (
            f"{len(self.played)} of {self.world_size} ranks played in {self.seconds:.0f} s "
            f"({self.rounds} rounds): {self.launches} operations over {self.communicators} communicators"
        )
        unsettled = () if self.is_settled else ("answers depend on the order of play: the ranks do not agree",)
        if not self.found:
            return "\n".join([head, *unsettled, "all ranks launch the same operations in one order"])
        return "\n".join([head, *unsettled, f"{len(self.found)} disagreements:", *map(str, self.found)])


def check(subject: PlayedRun) -> Checked:
    """Play the ranks of `subject` and compare them.

    Raises Undecided for a decision without an oracle, and what the run itself raises.
    """
    began_s, play = time.monotonic(), Play(subject)
    first = play.run(0)
    if first.error is not None:
        raise first.error
    ranks = ranks_to_play(first.axes, first.table, subject.script.seed)
    rounds, played = 0, dict[int, Played]()
    while rounds < _MOST_ROUNDS and (not rounds or play.board.has_changed):
        play.board.begin()
        played = {rank: play.run(rank) for rank in ranks}
        rounds += 1
    launches = {rank: each.launches for rank, each in played.items()}
    errors = {rank: each.error for rank, each in played.items() if each.error is not None}
    found = tuple(disagreements(launches, errors.keys()))
    for error in () if found else errors.values():
        raise error
    return Checked(
        world_size=subject.world_size,
        played=tuple(ranks),
        launches=sum(map(len, launches.values())),
        communicators=len({call.communicator for calls in launches.values() for call in calls}),
        rounds=rounds,
        is_settled=not play.board.has_changed,
        found=found,
        seconds=time.monotonic() - began_s,
    )
