"""Pipeline schedules: lists of actions for each rank, their validation, and the schedules of the literature.

A schedule is data: the runner executes any of them, and a schedule can be read and written by hand:

    0F0 0F1 1F0 1B0 ...        stage 0 forward of micro-batch 0, ...; "." is an idle turn in a table

Backward is one action (`B`) or two: `I` computes the gradient of the stage's input, which the previous stage waits
for, and `W` those of its weights, which no other rank waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
Sends and receives are not listed: they follow from the actions (the output of a stage goes to the rank of the next
stage), so no schedule can omit one.

`Schedule.checked` validates before a run: every stage runs forward and backward of every micro-batch once, on the
rank that holds it, and no order deadlocks, which is found by executing the actions without data.

With P ranks, M micro-batches and V stages per rank, and a backward as long as two forwards, a batch takes M turns of
work plus the bubble, given here as a fraction of the work:

| schedule | bubble | micro-batches in flight |
|---|---|---|
| gpipe (Huang et al. 2019) | (P-1)/M | M |
| 1f1b (Narayanan et al. 2021, section 2.2) | (P-1)/M | P - rank |
| interleaved (the same) | (P-1)/(V M) | (P - rank - 1) 2 + (V-1) P + 1, each of 1/V of the layers |
| zero bubble (ZB-H1; Qi et al. 2023, section 3) | (P-1)/(3 M), if M >= P and F, I, W take equally long | P |

1F1B is from PipeDream (Narayanan et al. 2019); this is the variant that flushes at the end of a batch.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs


class ActionKind(enum.Enum):
    """Kind of work on one micro-batch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # INPUT and WEIGHT in one
    INPUT = "I"  # gradient of the stage's input, and so of all stages before
    WEIGHT = "W"  # gradients of the stage's weights; after INPUT

    @property
    def makes_gradient(self) -> bool:
        """True if the previous stage may start its backward afterwards."""
        return self in (ActionKind.BACKWARD, ActionKind.INPUT)

    @property
    def frees_activations(self) -> bool:
        """True if the stage keeps nothing of the micro-batch afterwards."""
        return self in (ActionKind.BACKWARD, ActionKind.WEIGHT)


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@attrs.frozen(order=True)
class Action:
    """One forward or backward; `str(action)` is its text, which `Action.parse` reads."""

    stage: int  # 0 .. stages-1 along the model
    kind: ActionKind = attrs.field(order=lambda kind: "FBIW".index(kind.value))
    micro: int  # 0 .. micro_batches-1

    @classmethod
    def parse(cls, text: str) -> Action:
        """Parse the text of an action.  Raises ValueError."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not a pipeline action: write STAGE, one of F B I W, and MICRO-BATCH, as in 2F0"
            )
        return cls(int(found[1]), ActionKind(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro}"


class ScheduleError(ValueError):
    """The schedule cannot be executed; the message names the rank and the action."""


@attrs.frozen(cache_hash=True)
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
        """Parse the text form, ignoring blank lines and `#` comments; the schedule is checked.

        Raises ScheduleError for a text without actions or a schedule that cannot run.
        """
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
                raise ScheduleError(f"schedule {self.name!r} deadlocks: {self._describe_deadlock(position, done)}")
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

    def _describe_deadlock(self, position: Sequence[int], done: set[Action]) -> str:
        found = []
        for rank, actions in enumerate(self.ranks):
            for action in actions[position[rank] : position[rank] + 1]:
                need = self.missing(action, done)[0]
                what = "forward" if need.kind is ActionKind.FORWARD else "backward"
                found.append(f"rank {rank} at {action} waits for the {what} of {need.micro} at stage {need.stage}")
        return "; ".join(found)


def make_schedule(name: str, ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Make a schedule by name: gpipe, 1f1b, interleaved, zero_bubble.

    1f1b with several stages on a rank is interleaved.

    Raises ScheduleError for another name, or counts that do not fit.
    """
    if name == "interleaved" or (name == "1f1b" and stages_per_rank > 1):
        return interleaved(ranks, micro_batches, stages_per_rank)
    if name not in SCHEDULES:
        raise ScheduleError(
            f"unknown schedule {name!r}; choose one of {', '.join(sorted([*SCHEDULES, 'interleaved']))}"
        )
    if stages_per_rank != 1:
        raise ScheduleError(f'schedule {name!r} has one stage a rank, not {stages_per_rank}; use "interleaved"')
    return SCHEDULES[name](ranks, micro_batches)


def forward_only(ranks: int, micro_batches: int, stages_per_rank: int = 1) -> Schedule:
    """Run forwards alone, micro-batch by micro-batch through all stages, as an evaluation does."""
    stages, micros = ranks * stages_per_rank, range(micro_batches)
    lists = (
        tuple(Action(stage, ActionKind.FORWARD, m) for m in micros for stage in range(rank, stages, ranks))
        for rank in range(ranks)
    )
    return Schedule("forward only", stages, micro_batches, tuple(lists))


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """Run all forwards, then all backwards.  Raises ScheduleError for counts below 1."""
    _check_counts(ranks, micro_batches)
    micros = range(micro_batches)
    lists = [
        (
            *(Action(rank, ActionKind.FORWARD, m) for m in micros),
            *(Action(rank, ActionKind.BACKWARD, m) for m in micros),
        )
        for rank in range(ranks)
    ]
    return Schedule("gpipe", ranks, micro_batches, tuple(lists)).checked()


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Run forwards until the first backward is due, then alternate; keeps P micro-batches in memory instead of M.

    Raises ScheduleError for counts below 1.
    """
    _check_counts(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        forwards = [Action(rank, ActionKind.FORWARD, m) for m in range(micro_batches)]
        backwards = [Action(rank, ActionKind.BACKWARD, m) for m in range(micro_batches)]
        lists.append(_alternate(forwards, backwards, warmup=min(ranks - rank - 1, micro_batches)))
    return Schedule("1f1b", ranks, micro_batches, tuple(lists)).checked()


def interleaved(ranks: int, micro_batches: int, stages_per_rank: int) -> Schedule:
    """Run 1F1B over several stages per rank; divides the bubble by their number and sends more.

    Raises ScheduleError for counts below 1, or if `ranks` does not divide `micro_batches`. Narayanan et al. 2021,
    section 2.2.
    """
    _check_counts(ranks, micro_batches)
    if stages_per_rank < 1 or (micro_batches % ranks and stages_per_rank > 1):
        raise ScheduleError(
            f"an interleaved schedule takes micro-batches in groups of {ranks} (one for each rank): {micro_batches} "
            f"micro-batches with {stages_per_rank} stages a rank do not divide; choose a multiple of {ranks}"
        )
    if stages_per_rank == 1:
        return one_f_one_b(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        turns = range(micro_batches * stages_per_rank)

        def action(kind: ActionKind, turn: int, rank: int = rank) -> Action:
            chunk = turn // ranks % stages_per_rank
            chunk = chunk if kind is ActionKind.FORWARD else stages_per_rank - 1 - chunk
            micro = turn // (ranks * stages_per_rank) * ranks + turn % ranks
            return Action(chunk * ranks + rank, kind, micro)

        warmup = min((ranks - rank - 1) * 2 + (stages_per_rank - 1) * ranks, len(turns))
        forwards = [action(ActionKind.FORWARD, turn) for turn in turns]
        backwards = [action(ActionKind.BACKWARD, turn) for turn in turns]
        lists.append(_alternate(forwards, backwards, warmup))
    return Schedule("interleaved", ranks * stages_per_rank, micro_batches, tuple(lists)).checked()


def zero_bubble(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B with weight gradients delayed by `rank` micro-batches, so that they fill the bubble at the end.

    Raises ScheduleError for counts below 1. Qi et al. 2023.
    """
    _check_counts(ranks, micro_batches)
    lists = []
    for rank in range(ranks):
        ahead = min(ranks - rank, micro_batches)
        actions = [Action(rank, ActionKind.FORWARD, micro) for micro in range(ahead)]
        for micro in range(micro_batches):
            actions.append(Action(rank, ActionKind.INPUT, micro))
            if micro >= rank:
                actions.append(Action(rank, ActionKind.WEIGHT, micro - rank))
            if micro + ahead < micro_batches:
                actions.append(Action(rank, ActionKind.FORWARD, micro + ahead))
        late = range(max(micro_batches - rank, 0), micro_batches)
        lists.append((*actions, *(Action(rank, ActionKind.WEIGHT, micro) for micro in late)))
    return Schedule("zero bubble", ranks, micro_batches, tuple(lists)).checked()


SCHEDULES: Mapping[str, Callable[[int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero_bubble": zero_bubble,
}


def _alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> tuple[Action, ...]:
    steady = len(forwards) - warmup
    pairs = [each for pair in zip(forwards[warmup:], backwards[:steady]) for each in pair]
    return (*forwards[:warmup], *pairs, *backwards[steady:])


def _check_counts(ranks: int, micro_batches: int) -> None:
    if ranks < 1 or micro_batches < 1:
        raise ScheduleError(f"a schedule needs at least one rank and micro-batch, got {ranks} and {micro_batches}")
