"""Process identity: the host of a process, and whether the process has ended.

Two processes are on one host if one can look the other up by its pid: such processes can map each other's memory and
see whether the other is alive.  Two containers of one machine count as two hosts unless they share a pid namespace.
The kernel numbers its boots and its pid namespaces; both are needed.

A pid alone does not identify a process, because the kernel reuses pids; the pid and the start time do.
"""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["has_ended", "memory_kills", "process_identity", "this_host"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = "/proc/self/ns/pid"
_GROUPS = Path("/sys/fs/cgroup")


def this_host() -> str:
    """Identity of this host, equal in two processes if and only if they share it; "" where it is unknown."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PIDS)}"
    except OSError:
        return ""


def process_identity() -> dict[str, Any]:
    """Return the identity of this process, as JSON: pid, host name, host and start time."""
    pid = os.getpid()
    return {"pid": pid, "node": platform.node(), "host": this_host(), "started": start_time(pid)}


def has_ended(identity: dict[str, Any]) -> bool:
    """True if the process is known to have ended; False if it runs, or if it cannot be seen from here."""
    host = this_host()
    return bool(host) and identity["host"] == host and start_time(identity["pid"]) != identity["started"]


def memory_kills() -> str:
    """Return what to add to the report of a process that is gone: memory kills of this control group; "" for none."""
    try:
        own = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].strip("/")
        texts = [
            path.read_text() for path in (_GROUPS / own / "memory.events", _GROUPS / "memory.events") if path.exists()
        ]
    except OSError:
        return ""
    counts = [int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("oom_kill ")]
    most = max(counts, default=0)
    return f"; its control group has had {most} kill{'s' * (most > 1)} for memory" if most else ""


def start_time(pid: int) -> str:
    """Start time of a process of this host, in clock ticks; "" if it has ended, also as a zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()  # the name before may hold anything
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
