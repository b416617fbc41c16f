"""A pipeline schedule: for each rank its actions in order, and which rank holds which stage.

`check` proves before a run what would otherwise be a hang in the middle of one: every stage sees every micro-batch
forward and backward once, on the rank that holds it, and the orders of all ranks fit together, found by carrying
them out without data.

Sources: GPipe (Huang et al. 2019); 1F1B (Narayanan et al. 2019, PipeDream; the flushing one of Narayanan et al. 2021,
section 2.2); interleaved stages (the same, section 2.2); zero bubble, ZB-H1 (Qi et al. 2023, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from .actions import Action, Kind


class ScheduleError(ValueError):
    """A schedule that cannot be carried out; says where."""


@attrs.frozen
class Schedule:
    """`ranks[r]` are rank r's actions in order; stage s lies on rank `s % len(ranks)`."""

    name: str
    stages: int
    micro_batches: int
    ranks: tuple[tuple[Action, ...], ...]

    def rank_of(self, stage: int) -> int:
        """Stages lie on ranks in turn, so that neighbours of a stage are on neighbours of its rank."""
        return stage % len(self.ranks)

    def stages_of(self, rank: int) -> range:
        """Stages of one rank, in the order of the model."""
        return range(rank, self.stages, len(self.ranks))

    def text(self) -> str:
        """A line a rank; `parse` reads it."""
        return "\n".join(" ".join(map(str, actions)) for actions in self.ranks)

    @classmethod
    def parse(cls, text: str, name: str = "custom") -> Schedule:
        """From the text form, blank lines and `#` comments aside; checked."""
        lines = [line.split("#")[0].split() for line in text.splitlines()]
        ranks = tuple(tuple(map(Action.parse, line)) for line in lines if line)
        every = [action for actions in ranks for action in actions]
        if not every:
            raise ScheduleError(f"schedule {name!r} holds no action")
        stages, micros = max(each.stage for each in every) + 1, max(each.micro for each in every) + 1
        return cls(name, stages, micros, ranks).checked()

    def checked(self) -> Schedule:
        """The schedule itself, if it can be carried out; ScheduleError says which rank and action could not be."""
        if self.stages % len(self.ranks):
            raise ScheduleError(
                f"{self.stages} stages on {len(self.ranks)} ranks: each rank holds as many, so the stages must be a "
                f"multiple of {len(self.ranks)}"
            )
        for rank, actions in enumerate(self.ranks):
            self._check_rank(rank, actions)
        for _ in self.turns():
            pass
        return self

    def _check_rank(self, rank: int, actions: Sequence[Action]) -> None:
        """Each stage of the rank, and no other, has each micro-batch's work once."""
        for action in actions:
            if (
                action.stage >= self.stages
                or self.rank_of(action.stage) != rank
                or action.micro >= self.micro_batches
            ):
                held = ", ".join(map(str, self.stages_of(rank)))
                raise ScheduleError(
                    f"rank {rank} has {action}, and holds stages {held} of {self.micro_batches} micro-batches"
                )
        done = set(actions)
        for stage in self.stages_of(rank):
            for micro in range(self.micro_batches):
                found = "".join(kind.value for kind in Kind if Action(stage, kind, micro) in done)
                if found not in ("FB", "FIW"):
                    raise ScheduleError(
                        f"stage {stage}, micro-batch {micro}: the schedule has {found or 'nothing'}; it needs one F, "
                        "and one B or I and W"
                    )
        if len(done) != len(actions):
            twice = next(each for number, each in enumerate(actions) if each in actions[:number])
            raise ScheduleError(f"rank {rank} has {twice} twice")

    def turns(self) -> Iterator[list[Action | None]]:
        """Carry it out with every action as long as every other: what each rank does in each turn.

        Raises ScheduleError where every rank waits for another.
        """
        position, done = [0] * len(self.ranks), set[Action]()
        total = sum(map(len, self.ranks))
        while len(done) < total:
            turn: list[Action | None] = []
            for rank, actions in enumerate(self.ranks):
                rest = actions[position[rank] :]
                turn.append(rest[0] if rest and not self.missing(rest[0], done) else None)
            if not any(turn):
                raise ScheduleError(f"schedule {self.name!r} stands still: {self._waiting(position, done)}")
            for rank, action in enumerate(turn):
                if action is not None:
                    done.add(action)
                    position[rank] += 1
            yield turn

    def needs(self, action: Action) -> list[Action]:
        """What must be over before `action`; a whole backward will do where its first half is named."""
        stage, kind, micro = action.stage, action.kind, action.micro
        if kind is Kind.FORWARD:
            return [Action(stage - 1, Kind.FORWARD, micro)] if stage else []
        if kind is Kind.WEIGHT:
            return [Action(stage, Kind.INPUT, micro)]
        own = [Action(stage, Kind.FORWARD, micro)]
        return own if stage == self.stages - 1 else [*own, Action(stage + 1, Kind.INPUT, micro)]

    def missing(self, action: Action, done: set[Action]) -> list[Action]:
        """What `action` needs and is not in `done`."""
        return [
            need
            for need in self.needs(action)
            if need not in done
            and not (need.kind is Kind.INPUT and Action(need.stage, Kind.BACKWARD, need.micro) in done)
        ]

    def _waiting(self, position: Sequence[int], done: set[Action]) -> str:
        told = []
        for rank, actions in enumerate(self.ranks):
            for action in actions[position[rank] : position[rank] + 1]:
                need = self.missing(action, done)[0]
                what = "forward" if need.kind is Kind.FORWARD else "backward"
                told.append(f"rank {rank} at {action} waits for the {what} of {need.micro} at stage {need.stage}")
        return "; ".join(told)
