"""Every rank succeeds, or every rank raises the same error.

A save or a load consists of a few stages.  In each, a rank does its part and then exchanges the outcome; if any part
failed, all ranks raise one error that names the first rank that failed and the reason.  Without the vote the healthy
ranks would continue, commit half a checkpoint, or hang in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from zckpt.errors import CheckpointError, error_class, os_error_path, os_error_text
from zckpt.format.canonical import JSON
from zckpt.ranks.peers import Peers


@attrs.frozen
class Vote:
    """The peers of one save or load, and the texts of its errors."""

    peers: Peers
    task: str  # the operation, for errors: "save of 'step-3' into runs/a"
    failure: type[CheckpointError]  # class that wraps foreign errors

    def run(self, stage: str, work: Callable[[], JSON]) -> list[JSON]:
        """Run `work` here and exchange the outcome; returns the results in rank order, or raises the common error.

        KeyboardInterrupt and its kind are sent to the peers as a failure and re-raised unchanged here.
        """
        failure: BaseException | None = None
        try:
            answer = {"ok": work()}
        except BaseException as error:
            failure = error
            answer = {"failed": self._describe(error)}
        answers = self._exchange(stage, answer, failure)
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        broken = [(rank, each["failed"]) for rank, each in enumerate(answers) if "failed" in each]
        if broken:
            raise self._common_error(stage, broken) from failure
        return [each["ok"] for each in answers]

    def _exchange(self, stage: str, answer: JSON, failure: BaseException | None) -> list[JSON]:
        rank, world_size = self.peers.rank, self.peers.world_size
        try:
            answers = self.peers.exchange(answer)
        except Exception as lost:
            own = f"; earlier error on this rank: {failure}" if failure is not None else ""
            raise self.failure(
                f"{self.task} failed while {stage}: rank {rank} lost its peers ({type(lost).__name__}: {lost}){own}",
                rank=rank,
            ) from lost
        if len(answers) != world_size:
            raise self.failure(
                f"{self.task}: exchange() returned {len(answers)} values for a world of {world_size} ranks"
            )
        return answers

    def _describe(self, error: BaseException) -> JSON:
        if isinstance(error, CheckpointError):
            return {"kind": type(error).__name__, "text": str(error), "path": error.path}
        if isinstance(error, OSError):
            return {"kind": self.failure.__name__, "text": os_error_text(error), "path": os_error_path(error)}
        return {"kind": self.failure.__name__, "text": f"{type(error).__name__}: {error}", "path": ""}

    def _common_error(self, stage: str, broken: list[tuple[int, JSON]]) -> CheckpointError:
        rank, first = broken[0]
        others = ", ".join(str(other) for other, _ in broken[1:])
        also = f" (also failed: rank {others})" if others else ""
        return error_class(first["kind"])(
            f"{self.task} failed while {stage}: rank {rank}: {first['text']}{also}",
            rank=rank,
            path=first["path"],
        )
