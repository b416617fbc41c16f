"""Pipeline schedules: an ordered list of actions for each rank, and the placement of stages on ranks.

`checked` proves before a run what would otherwise hang in the middle of one: every stage runs forward and backward of
every micro-batch once, on the rank that holds it, and the orders of all ranks fit together, which is found by
executing them without data.

Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream; the flushing one of Narayanan et al. 2021,
    section 2.2); interleaved stages (the same, section 2.2); zero bubble, ZB-H1 (Qi et al. 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from zpartition.pipeline.actions import Action, ActionKind


class ScheduleError(ValueError):
    """The schedule cannot be executed; the text says where."""


@attrs.frozen
class Schedule:
    """`ranks[r]` are rank r's actions in order; stage s is on rank `s % len(ranks)`."""

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    def rank_of(self, stage: int) -> int:
        """Return the rank of a stage; stages are assigned round-robin, so adjacent stages are on adjacent ranks."""
        return stage % len(self.ranks)

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank in model order."""
        return range(rank, self.stages, len(self.ranks))

    def text(self) -> str:
        """Format one line per rank; `parse` reads it."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str, name: str = "custom") -> Schedule:
        """Parse the text form, ignoring blank lines and `#` comments; the schedule is checked."""
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        ranks = tuple(tuple(map(Action.parse, line)) for line in lines if line)
        every = [action for actions in ranks for action in actions]
        if not every:
            raise ScheduleError(f"schedule {name!r} holds no action")
        stages, micros = max(each.stage for each in every) + 1, max(each.micro for each in every) + 1
        return cls(name, stages, micros, ranks).checked()

    def checked(self) -> Schedule:
        """Return the schedule if it can be executed.  Raises ScheduleError with the rank and action that cannot."""
        if self.stages % len(self.ranks):
            raise ScheduleError(
                f"{self.stages} stages on {len(self.ranks)} ranks: every rank holds equally many, so the number of "
                f"stages must be a multiple of {len(self.ranks)}"
            )
        for rank, actions in enumerate(self.ranks):
            self._check_rank(rank, actions)
        for _ in self.turns():
            pass
        return self

    def _check_rank(self, rank: int, actions: Sequence[Action]) -> None:
        """Check that the rank does the work of each micro-batch once for each of its stages, and no other work."""
        for action in actions:
            if (
                action.stage >= self.stages
                or self.rank_of(action.stage) != rank
                or action.micro >= self.micro_batches
            ):
                held = ", ".join(map(str, self.stages_of(rank)))
                raise ScheduleError(
                    f"rank {rank} has {action}, but holds stages {held} of {self.micro_batches} micro-batches"
                )
        done = set(actions)
        for stage in self.stages_of(rank):
            for micro in range(self.micro_batches):
                found = "".join(kind.value for kind in ActionKind if Action(stage, kind, micro) in done)
                if found not in ("FB", "FIW"):
                    raise ScheduleError(
                        f"stage {stage}, micro-batch {micro}: the schedule has {found or 'nothing'}; it needs one F, "
                        "and one B or I and W"
                    )
        if len(done) != len(actions):
            twice = next(each for number, each in enumerate(actions) if each in actions[:number])
            raise ScheduleError(f"rank {rank} has {twice} twice")

    def turns(self) -> Iterator[list[Action | None]]:
        """Execute with actions of equal length; yields the actions of all ranks in each turn.

        Raises ScheduleError if every rank waits for another.
        """
        position, done = [0] * len(self.ranks), set[Action]()
        total = sum(map(len, self.ranks))
        while len(done) < total:
            turn: list[Action | None] = []
            for rank, actions in enumerate(self.ranks):
                rest = actions[position[rank] :]
                turn.append(rest[0] if rest and not self.missing(rest[0], done) else None)
            if not any(turn):
                raise ScheduleError(f"schedule {self.name!r} deadlocks: {self._waiting(position, done)}")
            for rank, action in enumerate(turn):
                if action is not None:
                    done.add(action)
                    position[rank] += 1
            yield turn

    def needs(self, action: Action) -> list[Action]:
        """Return the actions that must precede `action`; a whole backward satisfies its first half."""
        stage, kind, micro = action.stage, action.kind, action.micro
        if kind is ActionKind.FORWARD:
            return [Action(stage - 1, ActionKind.FORWARD, micro)] if stage else []
        if kind is ActionKind.WEIGHT:
            return [Action(stage, ActionKind.INPUT, micro)]
        own = [Action(stage, ActionKind.FORWARD, micro)]
        return own if stage == self.stages - 1 else [*own, Action(stage + 1, ActionKind.INPUT, micro)]

    def missing(self, action: Action, done: set[Action]) -> list[Action]:
        """Return the needed actions that are not in `done`."""
        return [
            need
            for need in self.needs(action)
            if need not in done
            and not (need.kind is ActionKind.INPUT and Action(need.stage, ActionKind.BACKWARD, need.micro) in done)
        ]

    def _waiting(self, position: Sequence[int], done: set[Action]) -> str:
        found = []
        for rank, actions in enumerate(self.ranks):
            for action in actions[position[rank] : position[rank] + 1]:
                need = self.missing(action, done)[0]
                what = "forward" if need.kind is ActionKind.FORWARD else "backward"
                found.append(f"rank {rank} at {action} waits for the {what} of {need.micro} at stage {need.stage}")
        return "; ".join(found)
