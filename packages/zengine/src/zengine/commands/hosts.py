"""Hostfiles, as DeepSpeed and MPI have them: which hosts, how many devices on each, and which of those to take.

    worker-1 slots=8
    worker-2 slots=8     # a comment

`include` and `exclude` are lists of hosts joined by "@", each with the numbers of its devices, or without for all:
"worker-1@worker-2:0,2".
"""

from __future__ import annotations

import re

import attrs

__all__ = ["Host", "chosen", "parse"]

_LINE = re.compile(r"(?P<name>[^\s#]+)\s+slots=(?P<slots>[1-9]\d*)$")


@attrs.frozen
class Host:
    """One machine and the devices that are used on it."""

    name: str
    devices: tuple[int, ...]
    slots: int  # devices that it has

    @property
    def takes_all(self) -> bool:
        """Whether no device is left out."""
        return len(self.devices) == self.slots


def parse(text: str) -> list[Host]:
    """The hosts of a file, in its order.  Raises ValueError with the line that cannot be read."""
    found: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f'line {number}: "{line}" is not "name slots=8"')
        if match["name"] in found:
            raise ValueError(f"line {number}: {match['name']} stands there twice")
        slots = int(match["slots"])
        found[match["name"]] = Host(match["name"], tuple(range(slots)), slots)
    if not found:
        raise ValueError('it names no host; write lines like "worker-1 slots=8"')
    return list(found.values())


def chosen(hosts: list[Host], *, include: str = "", exclude: str = "") -> list[Host]:
    """What a filter leaves.  Raises ValueError for names and devices that are not there, or when nothing is left."""
    if include and exclude:
        raise ValueError("--include and --exclude exclude each other: give one of them")
    named = _filter(include or exclude, hosts)
    found = []
    for host in hosts:
        picked = named.get(host.name, ())
        devices = tuple(d for d in host.devices if (d in picked) == bool(include)) if named else host.devices
        if devices:
            found.append(attrs.evolve(host, devices=devices))
    if not found:
        raise ValueError("the filter leaves no device")
    return found


def _filter(text: str, hosts: list[Host]) -> dict[str, tuple[int, ...]]:
    """Host -> its devices that are named."""
    known = {host.name: host for host in hosts}
    found: dict[str, tuple[int, ...]] = {}
    for part in filter(None, text.split("@")):
        name, colon, numbers = part.partition(":")
        if name not in known:
            raise ValueError(f'"{name}" is no host of the file; those are {", ".join(known)}')
        if colon and not re.fullmatch(r"\d+(,\d+)*", numbers):
            raise ValueError(f'"{part}" is not "host:0,2"')
        devices = tuple(map(int, numbers.split(","))) if colon else known[name].devices
        beyond = [device for device in devices if device >= known[name].slots]
        if beyond:
            raise ValueError(f"{name} has devices 0 to {known[name].slots - 1}, and not {beyond[0]}")
        found[name] = devices
    return found
