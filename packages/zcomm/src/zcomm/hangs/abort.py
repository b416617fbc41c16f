"""Abort: a failing rank publishes its error, and peers blocked on it raise within two seconds.

A rank that raises between two messages of a pipeline leaves its peers in receives that are never answered, and they
fail only at the time-out, minutes later.  So the failing rank calls `abort`.  Its reason becomes the
failure of the world (`detector.py`), and every collective, pending or later, raises it.  Messages that zcomm does not
wait for (torch's own sends and receives) are ended from the detector's thread, which closes the connections of their
group; this costs nothing until then:

    zcomm.close_on_failure(group)          # once
    try:
        ...                                # torch.distributed.recv(...) over `group`, and work
    except Exception as error:
        if zcomm.failure():                # another rank failed first
            raise MyError(zcomm.failure()) from error
        zcomm.abort(f"rank {rank} failed: {error}")
        raise

Rejected: receives that poll every second (torch's receive closes all connections of its group on a time-out); a
message to every peer that might wait (peers wait for other ranks as well and would have to read it first).
"""

from __future__ import annotations

from typing import Any

from zcomm.hangs import detector

__all__ = ["abort", "close_on_failure", "diagnose_failure", "failure"]

_NO_WORLD = "the other ranks could not be asked"


def abort(reason: str, *, unless_all: bool = False) -> None:
    """Fail every collective of this world with `reason`, on all ranks.  The world can only be closed afterwards.

    Returns when all ranks have received the reason, or after a few seconds.  The first failure of a world counts;
    later reasons are ignored.  Does nothing outside a world and in a world of one.

    unless_all: do nothing if every rank calls within a second or so.  They all fail by themselves then, none waits
        for another, and the world still works.
    """
    present = detector.start()
    if present is not None and not (unless_all and present.is_common_failure()):
        present.abort(reason)


def failure() -> str:
    """Reason of this world's failure: that of `abort`, or the diagnosis of a collective; "" while there is none.

    Set at the latest when a closed connection, or a collective, raises.  Reads one variable.
    """
    return detector.world_failure()


def diagnose_failure() -> str:
    """Collect the reports of all ranks after an error of torch's own messages; return the diagnosis.

    Takes a few seconds at most and fails the world as a failed collective does.  Returns the text that
    `CollectiveFailed` carries, equal on all ranks.
    """
    present = detector.start()
    return _NO_WORLD if present is None else present.explain()


def close_on_failure(group: Any) -> None:
    """Close the connections of `group` (None: the default group) when the world fails.

    A pending send, receive or collective of torch's then raises RuntimeError, and `failure` returns the reason.  Not
    needed for groups that carry zcomm's collectives only.
    """
    present = detector.start()
    if present is not None:
        present.close_on_failure(present.world() if group is None else group)
