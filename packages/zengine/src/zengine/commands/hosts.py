"""Hostfiles in the format of DeepSpeed and MPI, and their filters.

    worker-1 slots=8
    worker-2 slots=8     # a comment

`include` and `exclude` are hosts joined by "@", each with device numbers or without, for all its devices:
"worker-1@worker-2:0,2".
"""

from __future__ import annotations

import re

import attrs

__all__ = ["Host", "parse", "select"]

_LINE = re.compile(r"(?P<name>[^\s#]+)\s+slots=(?P<slots>[1-9]\d*)$")


@attrs.frozen
class Host:
    """Machine of a hostfile and its selected devices."""

    name: str
    devices: tuple[int, ...]
    slots: int  # devices of the host

    @property
    def uses_all(self) -> bool:
        """True if every device of the host is selected."""
        return len(self.devices) == self.slots


def parse(text: str) -> list[Host]:
    """Return the hosts in file order.  Raises ValueError with the number of an invalid line."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f'line {number}: "{line}" is not "name slots=8"')
        if match["name"] in found:
            raise ValueError(f"line {number}: {match['name']} is listed twice")
        slots = int(match["slots"])
        found[match["name"]] = Host(match["name"], tuple(range(slots)), slots)
    if not found:
        raise ValueError('the file has no host; write lines like "worker-1 slots=8"')
    return list(found.values())


def select(hosts: list[Host], *, include: str = "", exclude: str = "") -> list[Host]:
    """Return the hosts that pass a filter.  Raises ValueError for unknown names and devices, or an empty result."""
    if include and exclude:
        raise ValueError("--include and --exclude are mutually exclusive")
    named = _filter(include or exclude, hosts)
    found = []
    for host in hosts:
        picked = named.get(host.name, ())
        devices = tuple(d for d in host.devices if (d in picked) == bool(include)) if named else host.devices
        if devices:
            found.append(attrs.evolve(host, devices=devices))
    if not found:
        raise ValueError("the filter selects no device")
    return found


def _filter(text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Return host -> devices named by the filter."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise ValueError(f'"{name}" is not in the file; its hosts are {", ".join(known)}')
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ValueError(f'"{part}" is not "host:0,2"')
        devices = tuple(map(int, numbers.split(","))) if colon else known[name].devices
        beyond = [device for device in devices if device >= known[name].slots]
        if beyond:
            raise ValueError(f"{name} has devices 0 to {known[name].slots - 1}, not {beyond[0]}")
        found[name] = devices
    return found
