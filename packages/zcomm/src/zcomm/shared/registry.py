"""What each process group has been given: its transport, and the groups made of the same ranks.

[Note: the one registry]  The house keeps no process groups in module globals.  This is the exception: it maps
groups, weakly, to what this package has set up for them, because torch's ProcessGroup is the only thing that every
caller of a collective has, and it has no place for state of ours.  An entry is made by the
group's first collective over CPU tensors, or with the first group of its ranks (twins.py), and ends with the group:
when the last reference to it goes, when `World.close` closes all, when torch no longer knows the group (seen at the
next set-up), or at exit.

The set-up of a group is a collective; two threads that come first at once are kept apart by a lock per group, not
by one for all, since the ranks may come to their groups in different orders.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from typing import Protocol, final

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.shared import handshake
from zcomm.shared.hierarchy import Hierarchy
from zcomm.shared.lane import Step
from zcomm.shared.levels import Levels
from zcomm.shared.names import is_carried
from zcomm.shared.native import library
from zcomm.shared.places import APART
from zcomm.shared.transport import Message, Transport

__all__ = ["close_all", "issue", "kin", "transport", "transport_of", "transport_reason"]

_DEFAULT_TIMEOUT_S = 600.0
_NO_LOSS = (f"{handshake.VARIABLE}=gloo", APART)  # ends of reasons that are no news to the user


class Carrier(Protocol):
    """What carries a group over CPU tensors: a Transport on one host, a Hierarchy on several."""

    @property
    def memory(self) -> Transport:
        """Of the ranks on this host."""

    def issue(self, message: Message) -> Step | None:
        """None where it is Gloo's to do.  Raises SharedMemoryFailed."""

    def issue_here(self, message: Message) -> Step:
        """A collective of the ranks on this host, in its turn among those of the group.  The same errors."""

    def told(self) -> tuple[str, str]:
        """Its name, and why it is this one."""

    def close(self) -> None:
        """May be called again."""


@final
@attrs.define(eq=False)
class Entry:
    """What is known of one group.

    Invariant: at most one of `transport` and `reason` is set; neither before the set-up.
    """

    lock: threading.Lock = attrs.field(factory=threading.Lock)  # held during the set-up
    transport: Carrier | None = None
    reason: str = ""  # why Gloo carries this group
    refusal: handshake.TransportRefused | None = None  # why nothing does
    kin: dict[str, ProcessGroup] = attrs.field(factory=dict)  # groups of its ranks, by what they are to it


_entries: weakref.WeakKeyDictionary[ProcessGroup, Entry] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards changes of _entries


def issue(group: ProcessGroup | None, message: Message) -> Step | None:
    """Issue through shared memory, or None where it is Gloo's or NCCL's to do.

    The first call of a group is a collective over Gloo.  Raises TransportRefused, SharedMemoryFailed.
    """
    payload = message.payload
    if payload is not None and not is_carried(payload.dtype, reduced=message.reduction is not None):
        return None
    if payload is not None and payload.device.type != "cpu":
        return None
    found = transport_of(group)
    return None if found is None else found.issue(message)


def transport_of(group: ProcessGroup | None) -> Carrier | None:
    """The transport of a group that shares memory, wholly or in parts; None for others.  Set up now if need be.

    A collective on the group's first use.  Raises TransportRefused if a rank insists on shared memory in vain.
    """
    group = _resolved(group)
    entry = _entry(group)
    if entry.transport is None and not entry.reason:
        with entry.lock:
            if entry.transport is None and not entry.reason:
                _set_up(group, entry)
    if entry.refusal is not None:
        raise entry.refusal
    return entry.transport


def kin(group: ProcessGroup | None) -> dict[str, ProcessGroup]:
    """The groups that were made of the ranks of `group` and end with it."""
    return _entry(_resolved(group)).kin


def transport(group: ProcessGroup | None = None) -> str:
    """What carries the collectives of `group` over CPU tensors.

    "shared memory" on one host, "shared memory + gloo" on several with as many ranks each, "gloo", "nccl" or "none":
    for a world of one, where nothing is sent, and before the group's first collective, which decides.  Local: never
    waits for another rank.
    """
    return _told(group)[0]


def transport_reason(group: ProcessGroup | None = None) -> str:
    """Why `transport(group)` is what it is, in words."""
    return _told(group)[1]


def close_all() -> None:
    """Close the transports of all groups of this process."""
    with _lock:
        entries = list(_entries.values())
        _entries.clear()
    for entry in entries:
        if entry.transport is not None:
            entry.transport.close()


def _entry(group: ProcessGroup) -> Entry:
    entry = _entries.get(group)
    if entry is None:
        with _lock:
            entry = _entries.setdefault(group, Entry())
    return entry


def _resolved(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    world = dist.group.WORLD
    assert world is not None, "a world of one needs no transport"
    return world


def _set_up(group: ProcessGroup, entry: Entry) -> None:
    """Decide with the other ranks, once."""
    _close_forgotten()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if "gloo" not in dist.get_backend_config(group):
        entry.reason = f"its back end is {dist.get_backend(group)}"
        return
    timeout_s = compat.group_timeout_s(group, torch.device("cpu"), otherwise=_DEFAULT_TIMEOUT_S)
    try:
        outcome = handshake.agree(group, rank, size, timeout_s)
    except handshake.TransportRefused as error:
        entry.reason, entry.refusal = str(error), error
        return
    if isinstance(outcome, str):
        entry.reason = outcome
        if rank == 0 and not outcome.endswith(_NO_LOSS):
            warnings.warn(f"zcomm uses Gloo where shared memory would be faster: {outcome}.", stacklevel=2)
        return
    ranks = tuple(dist.get_process_group_ranks(group))
    if isinstance(outcome, handshake.Linked):
        entry.transport = _hierarchy(outcome, ranks, rank, timeout_s)
    else:
        entry.transport = Transport.open(library(), outcome, ranks, timeout_s)
    weakref.finalize(group, entry.transport.close)


def _hierarchy(found: handshake.Linked, ranks: tuple[int, ...], rank: int, timeout_s: float) -> Hierarchy:
    """The transport in two levels."""
    host, index = found.places.find(rank)
    here = tuple(ranks[place] for place in found.places.hosts[host])
    memory = Transport.open(library(), found.members, here, timeout_s)
    return Hierarchy.of(Levels(memory, found.network, found.places, host, index))


def _close_forgotten() -> None:
    """Close the transports of groups that torch has destroyed while somebody still refers to them."""
    for group, entry in list(_entries.items()):
        if entry.transport is not None and not _is_known(group):
            entry.transport.close()


def _is_known(group: ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _told(group: ProcessGroup | None) -> tuple[str, str]:
    if not dist.is_initialized():
        return "none", "torch.distributed is not initialised: a world of one"
    if dist.get_world_size(group) == 1:
        return "none", "the group has one rank"
    if "gloo" not in dist.get_backend_config(group):
        return "nccl", f"its back end is {dist.get_backend(group)}"
    entry = _entries.get(_resolved(group))
    if entry is None or (entry.transport is None and not entry.reason):
        return "none", "not decided: the group has communicated nothing yet"
    if entry.refusal is not None:
        return "none", entry.reason
    if entry.transport is not None:
        return entry.transport.told()
    return "gloo", entry.reason
