#!/usr/bin/env python3
"""Joins two network namespaces and holds every packet back for a while: a delay without the kernel's netem.

    network_relay.py MILLISECONDS PID PID

Makes a TUN interface in the namespace of each process, prints "ready", and passes packets until its standard input
ends.  It needs a processor of its own to some extent, which the rows with a delay share.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

INTERFACE = "wire"
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_MOST_BYTES = 1 << 16  # of a packet


def main() -> None:
    """Relay until the input ends."""
    delay_s, pids = float(sys.argv[1]) / 1e3, sys.argv[2:4]
    ends = [_tun(pid) for pid in pids]
    print("ready", flush=True)
    held: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # by the end they go to: (due time, packet)
    other = {ends[0]: 1, ends[1]: 0}
    while True:
        due_s = min((queue[0][0] for queue in held if queue), default=time.monotonic() + 60)
        readable, *_ = select.select([*ends, sys.stdin], [], [], max(0.0, due_s - time.monotonic()))
        if sys.stdin in readable:
            return
        for end in readable:
            held[other[end]].append((time.monotonic() + delay_s, os.read(end, _MOST_BYTES)))
        now_s = time.monotonic()
        for end, queue in zip(ends, held):
            while queue and queue[0][0] <= now_s:
                _write(end, queue.popleft()[1])


def _write(end: int, packet: bytes) -> None:
    with contextlib.suppress(OSError):  # the interface is not up yet: the packet is lost, as on a wire
        os.write(end, packet)


def _tun(pid: str) -> int:
    """Make the interface in the namespace of a process; returns its descriptor."""
    with open(f"/proc/{pid}/ns/net") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH14x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


if __name__ == "__main__":
    main()
