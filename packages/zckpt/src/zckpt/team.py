"""Every rank succeeds, or every rank raises the same error.

A save or a load is a few stages.  In each, a rank does its part and then tells the others how it went; if any part
failed, all raise one error that names the first rank that failed and why.  Without the vote the healthy ranks would
go on, commit half a checkpoint, or hang in their next collective.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import attrs

from .canonical import JSON
from .errors import CheckpointError, error_class
from .peers import Peers


@attrs.frozen
class Team:
    """The peers of one save or load, and the words for its errors."""

    peers: Peers
    task: str  # what they do together, as an error says it: "save of 'step-3' into runs/a"
    failure: type[CheckpointError]  # what an error that is not one of ours becomes

    def together(self, stage: str, work: Callable[[], JSON]) -> list[JSON]:
        """Run `work` here and learn how the others fared: every rank's result in rank order, or the one error.

        KeyboardInterrupt and its kind are told to the others as a failure and then go on here as themselves.
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
            own = f"; before that, here: {failure}" if failure is not None else ""
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


def os_error_path(error: OSError) -> str:
    return "" if error.filename is None else os.fspath(error.filename)


def os_error_text(error: OSError) -> str:
    """ "runs/a/x: No space left on device (ENOSPC)"."""
    code = errno.errorcode.get(error.errno or 0, "OSError")
    hint = "; does every rank see the same folder?" if error.errno == errno.ENOENT else ""
    return f"{os_error_path(error) or 'unknown path'}: {error.strerror or error} ({code}){hint}"
