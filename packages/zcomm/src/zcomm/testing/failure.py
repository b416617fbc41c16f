"""Reports of failed ranks.

A fault on one rank shows on all: the others lose their connections.  The report therefore has every rank's own error,
the root cause first and lost connections last.
"""

from __future__ import annotations

import enum
import traceback

import attrs

from zcomm.collectives.handles import CollectiveFailed


class Ending(enum.IntEnum):
    """Outcome of a rank's function, in the order of a report, root causes first."""

    DIED = 0  # the process ended by a signal or an exit, without a Python error
    RAISED = 1  # an exception of its own
    HUNG = 2  # still running at the time limit, or when others failed
    LOST_PEER = 3  # an exception caused by a broken connection to another rank
    RETURNED = 4  # normally


@attrs.frozen
class RankReport:
    """Outcome of one rank."""

    rank: int
    ending: Ending
    text: str  # traceback, stack or exit reason; "" if it returned
    error: str = ""  # class name of the exception, if any

    @property
    def headline(self) -> str:
        what = {
            Ending.DIED: "died",
            Ending.RAISED: f"raised {self.error}",
            Ending.HUNG: "was still running; its Python stack",
            Ending.LOST_PEER: f"lost its peers ({self.error})",
            Ending.RETURNED: "returned",
        }
        return f"rank {self.rank} {what[self.ending]}"


class RankFailed(RuntimeError):
    """Raised when a function run by `run_ranks` did not return on every rank.

    `reports` holds one RankReport per rank, root cause first.  The message includes all of them.
    """

    def __init__(self, function: str, world_size: int, reports: list[RankReport], note: str = "") -> None:
        self.function = function
        self.world_size = world_size
        self.reports = sorted(reports, key=lambda report: (report.ending, report.rank))
        super().__init__(self._message(note))

    def _message(self, note: str) -> str:
        returned = [str(report.rank) for report in self.reports if report.ending is Ending.RETURNED]
        lines = [f"{self.function} failed on {self.world_size} ranks{note}"]
        for report in self.reports:
            if report.ending is not Ending.RETURNED:
                lines += [f"--- {report.headline}:", report.text.rstrip()]
        if returned:
            lines.append(f"--- returned normally: rank {', '.join(returned)}")
        return "\n".join(lines)


_LOST = (
    "Connection reset by peer",
    "Connection closed by peer",
    "Broken pipe",
    "gloo/transport",
    "Gloo connectFullMesh failed",
    "Connection refused",
)


def is_lost_peer(error: BaseException) -> bool:
    """True if another rank's end explains this error."""
    if isinstance(error, CollectiveFailed):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _LOST)


def describe(error: BaseException, hide: str) -> str:
    """Format the traceback, without the frames of file `hide` at its top; adds the locals of a failed bare assert."""
    trail = traceback.TracebackException.from_exception(error)
    while len(trail.stack) > 1 and trail.stack[0].filename == hide:
        del trail.stack[0]
    text = "".join(trail.format())
    if isinstance(error, AssertionError) and not error.args:
        text += _last_locals(error)
    return text


def _last_locals(error: BaseException) -> str:
    """`name = value` of the frame that raised, since a bare `assert a == b` shows no values."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    found = frames[-1].f_locals if frames else {}
    return "".join(f"  where {name} = {_short(value)}\n" for name, value in found.items())


def _short(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:
        return f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= 300 else text[:297] + "..."
