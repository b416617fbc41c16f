"""A rank that fails in a batch tells the others, which wait for what it will never send.

The messages of a batch follow from its schedule, so whoever leaves it leaves ranks behind that wait: the neighbours,
the stages behind these, and where weights are reduced or gathered the copies of the pipeline.  The rank that fails
calls `zcomm.give_up`, which ends all these waits in a second or two, and raises what it raised; the others raise a
`StageFailed` with its words.  Nothing is sent, asked or looked up while batches succeed: a rank notes which action it
is at, and nothing else.

Afterwards the pipeline is lost.  Messages of the batch may be under way, nobody can tell them from new ones, and the
world's collectives are given up as well; so all that can be said is said, and the ranks have to be started again.

Rejected: a message to the next stage that something is wrong in place of data (one more header for each message, and
the ranks that wait for gradients from the other side would not hear it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import attrs
import torch.distributed as dist

import zcomm

from .actions import Action, Kind
from .module import PipelineError, PipelineModule

__all__ = ["Alarm", "StageFailed"]

_WORDS = {
    Kind.FORWARD: "the forward",
    Kind.BACKWARD: "the backward",
    Kind.INPUT: "the backward to the input",
    Kind.WEIGHT: "the backward to the weights",
}
_MOST = 2000  # characters of an exception's text that are told


class StageFailed(PipelineError, zcomm.CollectiveFailed):
    """Another rank failed in a batch that this one took part in: which, in what, and its exception's text."""


@final
@attrs.define(eq=False)
class Alarm:
    """What this rank of a pipeline is at, and whether a batch has failed."""

    module: PipelineModule
    doing: Action | str = ""  # in the present batch
    lost: str = ""  # why an earlier batch failed; "" if none did

    @contextmanager
    def guarding(self, call: str) -> Iterator[None]:
        """Around a batch, or a part of one; may be nested.

        Raises PipelineError if an earlier one has failed, StageFailed if this one does so on another rank.  What is
        raised inside is told to all ranks of the world, if there are several stages.
        """
        if self.lost:
            raise PipelineError(
                "an earlier batch of this pipeline failed, and messages of it may still be under way between the "
                f"ranks: start the ranks again, and load the last checkpoint. What happened: {self.lost}"
            )
        self.doing = call
        try:
            yield
        except BaseException as error:
            if self.lost or self.module.place.num_ranks == 1:
                raise  # told already, or nobody waits for a message
            others = zcomm.failure()
            self.lost = others or self._words(error)
            if not others:
                zcomm.give_up(self.lost)
                self.lost = zcomm.failure() or self.lost  # others may have been faster
            elif isinstance(error, Exception):
                raise StageFailed(self._left(others)) from error
            raise

    def go_on(self, action: Action) -> None:
        """Note what is done next.  Raises StageFailed if the world has failed, which a GPU's waits do not tell."""
        self.doing = action
        if others := zcomm.failure():
            self.lost = others
            raise StageFailed(self._left(others))

    def _words(self, error: BaseException) -> str:
        told = str(error)
        text = f"{type(error).__name__}: {told}" if told else type(error).__name__
        return f"{self._who()} failed in {self._what()}: {text[:_MOST]}"

    def _left(self, others: str) -> str:
        return (
            f"{others}\nThis is {self._who()}, which was in {self._what()} and cannot go on without it. Start the "
            "ranks again, and load the last checkpoint"
        )

    def _who(self) -> str:
        stages = [str(stage) for stage in self.module.my_stages]
        return f"rank {dist.get_rank()} (stage {' and '.join(stages)} of {self.module.num_stages})"

    def _what(self) -> str:
        if isinstance(self.doing, str):
            return self.doing
        return (
            f"{_WORDS[self.doing.kind]} of micro-batch {self.doing.micro} at stage {self.doing.stage} ({self.doing})"
        )
