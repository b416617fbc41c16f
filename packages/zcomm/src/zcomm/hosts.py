"""Host identity: two processes are on one host if one can look the other up by its pid.

Such processes can map each other's memory and see whether the other is alive.  Two containers of one machine count as
two hosts unless they share a pid namespace.  The kernel numbers its boots and its pid namespaces; both are needed.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["this_host"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PIDS = "/proc/self/ns/pid"


def this_host() -> str:
    """Identity of this host, equal in two processes if and only if they share it; "" where it is unknown."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink(_PIDS)}"
    except OSError:
        return ""
