"""Rendezvous: the store through which the ranks meet, and the error if they do not.

[Note: the store outlives the world]  torch's TCPStore lives in rank 0.  If it were closed with the world, a fast
rank's second `init()` could meet the store that rank 0 is about to close.  So the store stays, and every init of a
process uses a key prefix of its own; ranks that init the same number of times meet.

Rejected: leaving the rendezvous to torch's init_process_group.  Its client waits forever for an unrelated server that
accepts the connection and sends nothing (a taken port), and its errors name neither the launcher nor the limit.
"""

from __future__ import annotations

import itertools
import threading
from datetime import timedelta
from typing import Any

from zcomm import compat
from zcomm.groups.launch import Launch

__all__ = ["RendezvousFailed"]


class RendezvousFailed(RuntimeError):
    """Raised when the ranks do not all meet.  The message names address, port, world size and time limit."""


_MUTE_PEER_GRACE_S = 3.0  # torch's client times out by itself, except on a mute peer

_inits = itertools.count()  # key prefixes; see [Note: the store outlives the world]
_stores: dict[Launch, Any] = {}  # by launch


def rendezvous_store(launch: Launch, limit_s: float) -> Any:
    """Return a fresh key space shared by the ranks of `launch`: in memory for a world of one, else at its address.

    Raises torch's RuntimeError or TimeoutError.
    """
    if launch.world_size == 1:
        return compat.HashStore()
    if launch not in _stores:
        _stores[launch] = _connect(launch, limit_s)
    return compat.PrefixStore(f"zcomm-{next(_inits)}", _stores[launch])


def _connect(launch: Launch, limit_s: float) -> Any:
    """Connect in a separate thread, which stays behind if a mute peer blocks it."""
    outcome: list[Any] = []

    def connect() -> None:
        host = f"[{launch.address}]" if ":" in launch.address else launch.address
        url = f"tcp://{host}:{launch.port}?rank={launch.rank}&world_size={launch.world_size}"
        try:
            outcome.append(next(compat.rendezvous(url, timeout=timedelta(seconds=limit_s)))[0])
        except Exception as error:  # raised below, in the calling thread
            outcome.append(error)

    thread = threading.Thread(target=connect, daemon=True, name="zcomm-rendezvous")
    thread.start()
    thread.join(limit_s + _MUTE_PEER_GRACE_S)
    if not outcome:
        raise TimeoutError("something accepts connections there, but it is not a torch store")
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    return outcome[0]


def rendezvous_failed(launch: Launch, limit_s: float, error: Exception) -> RendezvousFailed:
    """Build the user's error from torch's."""
    reason = (str(error).splitlines() or [""])[0].rstrip(". ")
    srun = " Inside an sbatch script, start the script with srun." if launch.source == "slurm" else ""
    return RendezvousFailed(
        f"Rank {launch.rank} did not meet the others at {launch.address}:{launch.port} "
        f"({launch.source} launch, world size {launch.world_size}, timeout {limit_s:g} s): {reason}. "
        f"Check that all {launch.world_size} ranks were started, that MASTER_ADDR is the host of rank 0, and that "
        f"nothing else uses MASTER_PORT there.{srun} "
        "The limit is timeout_s, ZCOMM_TIMEOUT_S (seconds) or DEEPSPEED_TIMEOUT (minutes)."
    )
