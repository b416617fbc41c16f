"""A link between two network namespaces: veth with a rate limit, or a relay that also holds packets back.

A namespace has no name and lives as long as a process in it.  Its first process reads from a pipe of ours, so the
namespaces and their interfaces end with this process, whether it returns, is interrupted or is killed.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs

__all__ = ["INTERFACE", "Link", "LinkSpec", "sent_bytes"]

INTERFACE = "wire"  # of both ends
_RELAY = Path(__file__).with_name("network_relay.py")


@attrs.frozen
class LinkSpec:
    """A network: what passes in each direction."""

    gbits: float  # 10^9 bits in a second
    delay_ms: float = 0.0  # one way, beside that of the kernel

    @classmethod
    def parse(cls, text: str) -> LinkSpec:
        """Read "10" or "1+0.5ms".  Raises ValueError."""
        found = re.fullmatch(r"([\d.]+)(?:\+([\d.]+)ms)?", text)
        if not found or not float(found[1]):
            raise ValueError(f'a link is "gigabits" or "gigabits+delayms", such as 10 or 1+0.5ms; got {text!r}')
        return cls(float(found[1]), float(found[2] or 0))

    def __str__(self) -> str:
        return f"{self.gbits:g} Gbit/s" + (f" + {self.delay_ms:g} ms" if self.delay_ms else "")

    def seconds(self, nbytes: float) -> float:
        """Time of so many bytes in one direction."""
        return nbytes * 8 / (self.gbits * 1e9)


class Link:
    """Two namespaces, and what joins them.  A context manager; needs root and `unshare`, `nsenter`, `ip`, `tc`."""

    def __init__(self, spec: LinkSpec) -> None:
        self.spec = spec
        self._stack = ExitStack()
        self._holders: list[int] = []  # process ids

    def __enter__(self) -> Link:
        with ExitStack() as stack:
            self._holders = [_hold(stack) for _ in range(2)]
            if self.spec.delay_ms:
                stack.callback(_end, _start([sys.executable, str(_RELAY), f"{self.spec.delay_ms}", *self._ids()]))
            else:
                first, second = self._ids()
                peer = ["peer", "name", INTERFACE, "netns", second]
                _run(["ip", "link", "add", INTERFACE, "netns", first, "type", "veth", *peer])
            for end in range(2):
                self._set_up(end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def inside(self, end: int, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` in namespace 0 or 1."""
        return ["nsenter", f"--net=/proc/{self._holders[end]}/ns/net", *command]

    def _ids(self) -> list[str]:
        return [str(pid) for pid in self._holders]

    def _set_up(self, end: int) -> None:
        """Address, rate and congestion control of one end."""
        rate = f"{self.spec.gbits * 1e3:g}mbit"
        for command in (
            f"ip addr add 10.99.0.{end + 1}/24 dev {INTERFACE}",
            f"ip link set {INTERFACE} mtu {9000 if self.spec.delay_ms == 0 else 65000} up",
            "ip link set lo up",
            f"ip route change 10.99.0.0/24 dev {INTERFACE} src 10.99.0.{end + 1} congctl cubic",
            f"tc qdisc add dev {INTERFACE} root tbf rate {rate} burst 256kb latency 20ms",
        ):
            _run(self.inside(end, command.split()))


def sent_bytes() -> int:
    """Bytes that this process's namespace has sent over the link, with headers."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == INTERFACE:
            return int(counts.split()[8])
    raise RuntimeError(f"this process has no interface {INTERFACE}: start it through Link.inside")


def _hold(stack: ExitStack) -> int:
    """Start a process in a namespace of its own; returns its id."""
    held = _start(["unshare", "--net", "sh", "-c", "echo ready; exec cat"])
    stack.callback(_end, held)
    return int(held.pid)


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    """Start a process that ends with its standard input, and wait for its first line."""
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert made.stdout is not None
    if not made.stdout.readline():
        raise RuntimeError(f"{' '.join(command)} ended with {made.wait()}: is this process root?")
    return made


def _end(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _run(command: Sequence[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
