"""Decisions that depend on data, and the oracles that take them while ranks are played.

A decision is a line of code that reads an unknown value.  Each place in the packages at which this happens in a step
has a row in `DECISIONS`: a function of a `DataRead` that answers.  Answers are of two kinds.  What the ranks have
agreed on before (sums, exchanged counts) is drawn from the place and the number of the reading, so it is the same on
every rank.  Everything else is adversarial: drawn for each rank, so that ranks differ wherever the program lets them.
A reading without a row raises `Undecided` with the line; a user's own model brings its own rows (`--oracle`).
"""

from __future__ import annotations

import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine.ordering.unknown import Undecided

__all__ = ["DECISIONS", "DataRead", "Oracle", "Script"]


@attrs.frozen(kw_only=True)
class Script:
    """What happens in each step of a played run, agreed by all ranks."""

    seed: int = 0
    num_steps: int = 4
    overflows: frozenset[int] = frozenset({2})  # steps whose gradients are not finite
    misses: frozenset[int] = frozenset({0, 3})  # steps in which ranks miss some gradients, each other ones


@attrs.frozen(kw_only=True, eq=False)
class DataRead:
    """A line of code that reads an unknown value."""

    place: str  # "package.module:function"
    operation: str  # "tolist", "numpy", "_local_scalar_dense" (item, bool, int, float), "equal", "nonzero", ...
    shape: tuple[int, ...]  # of what is read
    dtype: torch.dtype
    rank: int
    world_size: int
    step: int
    number: int  # earlier readings at this place by this rank
    script: Script
    known: Mapping[str, Any]  # local variables of the function

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def agreed(self) -> random.Random:
        """Return random numbers that every rank gets at its reading of this number."""
        return random.Random(f"{self.script.seed} {self.place} {self.number}")

    def own(self) -> random.Random:
        """Return random numbers of this rank."""
        return random.Random(f"{self.script.seed} {self.place} {self.number} rank {self.rank}")


Decide = Callable[[DataRead], Any]


def _statistics(reading: DataRead) -> Any:
    """Sum of squares; drift, late buckets, unused parameters, loss, weight, weighted ranks, loss scale."""
    square = math.inf if reading.step in reading.script.overflows else 1.0
    unused = float(reading.step in reading.script.misses)
    late = float(reading.step in reading.script.misses)  # as if some were, so that second messages are played
    return [square, 0.0, late, unused, 0.5, 0.0, 0.0, 1.0][: reading.numel] if reading.shape else square


def _is_overflow(reading: DataRead) -> bool:
    return reading.step in reading.script.overflows


def _table(reading: DataRead) -> list[list[int]]:
    """Rows of (rank, expert): uneven, some of them empty, and at most what the rank has."""
    draw, choices = reading.agreed(), int(reading.known["experts"].numel())
    ranks, experts = reading.shape
    found = []
    for _ in range(ranks):
        left, row = choices, []
        for _ in range(experts):
            row.append(draw.choice((0, left // 2, draw.randint(0, left))))
            left -= row[-1]
        draw.shuffle(row)
        found.append(row)
    return found


def _requests(reading: DataRead) -> list[list[int]]:
    """What each rank asks of the experts in one round: all ask for this rank's shape, of any expert, or nothing."""
    draw, own = reading.agreed(), reading.known["own"]
    count = len(reading.known["self"].experts)
    rows = [[draw.randrange(count), *own[1:]] for _ in range(reading.shape[0])]
    rows[reading.known["self"].expert_group.rank] = list(own)
    return rows


# The places in the packages, by "module:function".
DECISIONS: Mapping[str, Decide] = {
    "zprecision.inspect:inspect": _statistics,
    "zprecision.inspect:_inspect_on_host": _statistics,
    "zprecision.inspect:merge_stats": _statistics,
    "zprecision.inspect:first_nonfinite": lambda reading: reading.own().random() < 0.5,  # this rank's shards
    "zprecision.scaling:at_floor": lambda reading: False,
    "zengine.build.mpu:check_copies": lambda reading: 0,  # digests of what tensor ranks hold whole
    "zengine.features.same_batch:_add": lambda reading: 0,  # digests of the batches of tensor ranks
    "zengine.engine.loss_weighting:add": lambda reading: reading.own().random(),
    "zengine.engine.nonfinite:__call__": lambda reading: 1.0,
    "zengine.pipeline_engine:train_batch": lambda reading: reading.own().random(),
    "zengine.pipeline_engine:_reduce_losses": lambda reading: reading.own().random(),
    "zpartition.gradients.bucket:inspect": lambda reading: not _is_overflow(reading) or reading.own().random() < 0.5,
    "zpartition.gradients.speculate:_was_right": _is_overflow,
    "zpartition.experts.dispatch:plan": _table,
    "zpartition.experts.module_list:_headers": _requests,
    "zpartition.pipeline.channels:read_header": lambda reading: reading.known["self"].reply_header(),
    "zpartition.pipeline.channels:_check_equal": lambda reading: 0.0,
    "zpartition.tensor.vocabulary:_check_tokens": lambda reading: False,
    "zpartition.tensor.vocabulary:vocabulary_cross_entropy": lambda reading: False,
}


@final
class Oracle:
    """Takes the decisions of one played rank."""

    def __init__(self, decisions: Mapping[str, Decide], rank: int, world_size: int, script: Script) -> None:
        self._decisions, self._rank, self._size, self._script = decisions, rank, world_size, script
        self._numbers: Counter[str] = Counter()
        self.step = 0

    def decide(self, tensor: Tensor, operation: str) -> Any:
        """Answer what a program reads from `tensor`.  Raises Undecided."""
        frame = _reading_frame()
        place, line = _place(frame), f"{frame.f_code.co_filename}:{frame.f_lineno}"
        number = self._numbers[place]
        self._numbers[place] += 1
        answer = self._decisions.get(place)
        if answer is None:
            what = f"{operation} of {tuple(tensor.shape)} {tensor.dtype}"
            raise Undecided(f'{line} reads a value that depends on data ({what}): give an oracle for "{place}"')
        reading = DataRead(
            place=place,
            operation=operation,
            shape=tuple(tensor.shape),
            dtype=tensor.dtype,
            rank=self._rank,
            world_size=self._size,
            step=self.step,
            number=number,
            script=self._script,
            known=frame.f_locals,
        )
        return answer(reading)


_SKIPPED = (str(Path(torch.__file__).parent), str(Path(__file__).parent), str(Path(random.__file__).parent))


def _reading_frame() -> Any:
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and (
        _is_library(frame.f_code.co_filename) or frame.f_code.co_name.startswith("<")  # a comprehension, a lambda
    ):
        frame = frame.f_back
    return frame


def _is_library(filename: str) -> bool:
    is_standard = filename.startswith(_SKIPPED[2]) and "-packages" not in filename
    return filename.startswith(_SKIPPED[:2]) or is_standard or filename.endswith("zengine/_compat.py")


def _place(frame: Any) -> str:
    return f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_name}"
