"""Abort: a rank that fails in a batch ends the waits of all others, which raise its error.

The messages of a batch follow from its schedule, so a rank that leaves it leaves others waiting: its neighbours, the
stages behind them, and, where weights are reduced or gathered, the replicas of the pipeline.  The failing rank calls
`zcomm.abort`, which ends all these waits within a second or two, and raises its exception; the others raise a
`StageFailed` with its text.  Successful batches cost nothing: a rank only notes its current action.

Afterwards the pipeline cannot be used.  Messages of the batch may be in flight and cannot be distinguished from
new ones, and the world's collectives are aborted as well.  So every later batch raises, and the ranks must be
restarted.

Rejected: an error message to the next stage in place of data (one more header for each message, and ranks that wait
for gradients from the other side would not receive it).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import attrs
import torch.distributed as dist

import zcomm
from zpartition.pipeline.module import PipelineError, PipelineModule
from zpartition.pipeline.schedule import Action, ActionKind

__all__ = ["AbortGuard", "StageFailed"]

_ACTION_NAMES = {
    ActionKind.FORWARD: "the forward",
    ActionKind.BACKWARD: "the backward",
    ActionKind.INPUT: "the backward to the input",
    ActionKind.WEIGHT: "the backward to the weights",
}
_MAX_ERROR_CHARS = 2000  # of an exception's text that other ranks get


class StageFailed(PipelineError, zcomm.CollectiveFailed):
    """Another rank failed in this batch; the text names the rank, its action and its exception."""


@final
@attrs.define(eq=False)
class AbortGuard:
    """The current action of this rank, and whether a batch has failed."""

    module: PipelineModule
    current: Action | str = ""  # in the present batch
    failure: str = ""  # why an earlier batch failed; "" if none did

    @contextmanager
    def guard(self, call: str) -> Iterator[None]:
        """Guard a batch, or a part of one; may be nested.

        An exception raised inside is sent to all ranks of the world, if there are several stages.

        Raises:
            PipelineError: an earlier batch failed.
            StageFailed: this batch failed on another rank.
        """
        if self.failure:
            raise PipelineError(
                "an earlier batch of this pipeline failed, and its messages may still be in flight: restart the "
                f"ranks and load the last checkpoint. The failure was: {self.failure}"
            )
        self.current = call
        try:
            yield
        except BaseException as error:
            if self.failure or self.module.pipeline_position.num_ranks == 1:
                raise  # reported already, or no rank waits for a message
            others = zcomm.failure()
            self.failure = others or self._describe_error(error)
            if not others:
                zcomm.abort(self.failure)
                self.failure = zcomm.failure() or self.failure  # others may have been faster
            elif isinstance(error, Exception):
                raise StageFailed(self._describe_left_behind(others)) from error
            raise

    def start_action(self, action: Action) -> None:
        """Record the next action.

        Raises:
            StageFailed: the world has failed, which waits on a GPU do not report.
        """
        self.current = action
        if others := zcomm.failure():
            self.failure = others
            raise StageFailed(self._describe_left_behind(others))

    def _describe_error(self, error: BaseException) -> str:
        message = str(error)
        text = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return f"{self._this_rank()} failed in {self._this_action()}: {text[:_MAX_ERROR_CHARS]}"

    def _describe_left_behind(self, others: str) -> str:
        return (
            f"{others}\nThis is {self._this_rank()}, which was in {self._this_action()} and cannot continue. Restart "
            "the ranks and load the last checkpoint"
        )

    def _this_rank(self) -> str:
        stages = [str(stage) for stage in self.module.my_stages]
        return f"rank {dist.get_rank()} (stage {' and '.join(stages)} of {self.module.num_stages})"

    def _this_action(self) -> str:
        if isinstance(self.current, str):
            return self.current
        name = _ACTION_NAMES[self.current.kind]
        return f"{name} of micro-batch {self.current.micro} at stage {self.current.stage} ({self.current})"
