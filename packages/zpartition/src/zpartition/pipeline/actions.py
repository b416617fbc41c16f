"""What a rank of a pipeline does, one thing after the other, as values and as text.

A schedule is data: for each rank a list of actions.  Whoever carries it out does not know which schedule it is, a
validator can prove it before any rank sends a byte, and a person can read and write it:

    0F0 0F1 1F0 1B0 ...        stage 0 forward of micro-batch 0, ...; "." is a turn without work in a table

Backward comes whole (`B`) or in two halves: `I` computes the gradient of the stage's input, which the stage before
waits for, and `W` those of its weights, which nobody waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

Sends and receives are not listed: they follow from the actions (what a stage's forward made goes to the next stage's
rank), so no schedule can forget one.
"""

from __future__ import annotations

import enum
import re

import attrs


class Kind(enum.Enum):
    """What is done with one micro-batch at one stage."""

    FORWARD = "F"
    BACKWARD = "B"  # INPUT and WEIGHT in one
    INPUT = "I"  # gradient of the stage's input, and so of all stages before
    WEIGHT = "W"  # gradients of the stage's weights; after INPUT

    @property
    def makes_gradient(self) -> bool:
        """Whether the stage before may go on with its own backward afterwards."""
        return self in (Kind.BACKWARD, Kind.INPUT)

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch is kept at this stage afterwards."""
        return self in (Kind.BACKWARD, Kind.WEIGHT)


_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


@attrs.frozen(order=True)
class Action:
    """One forward or backward; `str(action)` is its text, `Action.parse` reads it."""

    stage: int  # 0 .. stages-1 along the model
    kind: Kind = attrs.field(order=lambda kind: "FBIW".index(kind.value))
    micro: int  # 0 .. micro_batches-1

    @classmethod
    def parse(cls, text: str) -> Action:
        """ValueError if `text` is not an action."""
        found = _TEXT.fullmatch(text)
        if found is None:
            raise ValueError(
                f"{text!r} is not an action of a pipeline: write STAGE, one of F B I W, MICRO-BATCH, as in 2F0"
            )
        return cls(int(found[1]), Kind(found[2]), int(found[3]))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.micro}"
