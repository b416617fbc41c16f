"""Observer of collectives: the interface between handles and transports and the hang detector.

Handles and transports report every collective to the installed observer and ask it whether the world has been
aborted.  They depend on nothing else of hang detection, so `zcomm.hangs` is below `zcomm.collectives` and
`zcomm.shared`.

The null object is `NullObserver`.  Importing zcomm installs the hang detector's observer (`detector.py`) in its
place: groups that torch made without `zcomm.init` are observed from their first collective.
"""

from __future__ import annotations

from typing import Any, Protocol, final

from zcomm.hangs.fingerprint import Call, Fingerprint, Ring

HINT = " (A peer died, timed out or called another collective; look at the other ranks first.)"
ABORTED = "aborted: another rank failed; see its traceback."

UNOBSERVED = Ring("", ())  # collectives outside a world: no rank to compare with


class Observer(Protocol):
    """Receives every collective of this process."""

    def record(self, call: Call, group: Any, detail: Any) -> Fingerprint:
        """Record a collective that is about to be issued.  On the hot path: microseconds."""

    def check(self, fingerprint: Fingerprint) -> None:
        """Raise RuntimeError if the collective must not be issued: aborted world, or ranks that disagree."""

    def is_aborted(self) -> bool:
        """True once a collective has failed anywhere in the present world."""

    def explain(self, fingerprint: Fingerprint) -> str:
        """Return the diagnosis of a failed collective, to follow the back end's error."""


@final
class NullObserver:
    """Compares nothing; records the fingerprints that handles need in a ring without a group."""

    def record(self, call: Call, group: Any, detail: Any) -> Fingerprint:
        return UNOBSERVED.add(call, detail)

    def check(self, fingerprint: Fingerprint) -> None:
        """Accept every collective."""

    def is_aborted(self) -> bool:
        return False

    def explain(self, fingerprint: Fingerprint) -> str:
        return HINT


_observer: Observer = NullObserver()


def observer() -> Observer:
    """Return the installed observer."""
    return _observer


def install(new: Observer) -> None:
    """Replace the observer of this process."""
    global _observer
    _observer = new
