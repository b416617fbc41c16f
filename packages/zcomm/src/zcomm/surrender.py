"""A rank that cannot go on says so, and whoever waits for it is told why within a second or two.

A rank that raises between two messages of a pipeline leaves others in receives that nobody will ever answer, and
these tell what they wait for after minutes, if somebody has not ended the processes before.  Instead it calls
`give_up`: the reason is the verdict of the hang doctor (`doctor.py`), so every collective of the world fails with it,
the pending ones and those to come.  Messages that are not ours to wait for (torch's own sends and receives) are ended
from the doctor's thread by closing the links of their group, which costs nothing until then:

    zcomm.close_on_failure(group)          # once
    try:
        ...                                # torch.distributed.recv(...) over `group`, and work
    except Exception as error:
        if zcomm.failure():                # somebody else's fault: the words are theirs
            raise MyError(zcomm.failure()) from error
        zcomm.give_up(f"rank {rank} cannot go on: {error}")
        raise

Rejected: receives that look up every second (torch's receive closes all links of its group when its time is over);
a message to every peer that might wait (they wait for others as well, and would have to read it first).
"""

from __future__ import annotations

from typing import Any

from zcomm import doctor

__all__ = ["close_on_failure", "failure", "give_up", "inquire"]

_ALONE = "the other ranks could not be asked"


def give_up(reason: str) -> None:
    """Let every collective of this world fail with `reason`, on all ranks; the world can only be closed after it.

    Returns when all ranks have heard, or after a few seconds.  The first failure counts: later reasons are not told.
    Does nothing outside a world and in a world of one.
    """
    present = doctor.begin()
    if present is not None:
        present.give_up(reason)


def failure() -> str:
    """Why this world has failed: a reason of `give_up`, or the diagnosis of a collective; "" while it has not.

    Known at the latest when a closed link, or a collective, raises.  Costs no more than a look at a variable.
    """
    return doctor.present_verdict()


def inquire() -> str:
    """What all ranks say after a message of torch's own has failed here, as `CollectiveFailed` tells it.

    It takes seconds at most, ends the world as a failed collective does, and is the same text on all ranks.
    """
    present = doctor.begin()
    return _ALONE if present is None else present.explain()


def close_on_failure(group: Any) -> None:
    """When the world fails, end the messages of `group` (None: the default group) that this rank waits for.

    Whoever waits in torch's own receive, send or collective then gets a RuntimeError, and `failure` says why.  For
    links that only `CollectiveFailed` guards this is not needed.
    """
    present = doctor.begin()
    if present is not None:
        present.close_at_verdict(present.world() if group is None else group)
