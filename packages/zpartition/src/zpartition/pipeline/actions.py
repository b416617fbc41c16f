"""Actions of a pipeline rank, as values and as text.

A schedule is data: a list of actions for each rank.  The runner does not know which schedule it executes, a validator
    can prove it before any rank sends a byte, and it can be read and written by hand:

    0F0 0F1 1F0 1B0 ...        stage 0 forward of micro-batch 0, ...; "." is an idle turn in a table

Backward is one action (`B`) or two: `I` computes the gradient of the stage's input, which the previous stage waits
for, and `W` those of its weights, which no other rank waits for (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").

Sends and receives are not listed: they follow from the actions (the output of a stage goes to the rank of the next
    stage), so no schedule can omit one.
"""

from __future__ import annotations

import enum
import re

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
