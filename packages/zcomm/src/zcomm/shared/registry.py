"""Registry: the transport of each process group, and the groups derived from it.

[Note: the one registry]  The packages keep no process groups in module globals, with this exception: a weak map from
groups to the state that this package has set up for them.  torch's ProcessGroup is the only object that every caller
of a collective has, and it has no place for state of ours.  An entry is made by the group's first collective over CPU
tensors, or with the first group derived from it (duplicates.py).  It ends with the last reference to the group, when
`World.close` closes all, when torch no longer knows the group (noticed at the next set-up), or at exit.

The set-up of a group is a collective.  A lock per group, not a global one, serializes threads that come first at
once, since the ranks may set up their groups in different orders.
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
from zcomm.shared.hierarchy import HierarchicalTransport
from zcomm.shared.levels import Levels
from zcomm.shared.native import is_supported, library
from zcomm.shared.task_queue import Step
from zcomm.shared.transport import Message, Transport

__all__ = ["close_all", "derived_groups", "issue", "transport", "transport_of", "transport_reason"]

_DEFAULT_TIMEOUT_S = 600.0
_EXPECTED_REASON = f"{handshake.VARIABLE}=gloo"  # the end of a reason that needs no warning


class GroupTransport(Protocol):
    """Transport of a group's CPU tensors: a Transport on one host, a HierarchicalTransport on several."""

    @property
    def memory(self) -> Transport:
        """Transport of the ranks on this host."""

    def issue(self, message: Message) -> Step | None:
        """Issue a collective; return None if Gloo carries it.  Raises SharedMemoryFailed."""

    def issue_on_host(self, message: Message) -> Step:
        """Issue a collective of this host's ranks, in order with those of the group.  Raises SharedMemoryFailed."""

    def describe(self) -> tuple[str, str]:
        """Return the transport's name and the reason for it."""

    def close(self) -> None:
        """Release everything.  May be called again."""


@final
@attrs.define(eq=False)
class GroupEntry:
    """State of one group.

    Invariant: at most one of `transport` and `reason` is set; neither before the set-up.
    """

    lock: threading.Lock = attrs.field(factory=threading.Lock)  # held during the set-up
    transport: GroupTransport | None = None
    reason: str = ""  # for which Gloo carries this group
    error: handshake.TransportUnavailable | None = None  # raised by every use of the group
    derived_groups: dict[str, ProcessGroup] = attrs.field(factory=dict)  # groups of its ranks, by kind


_entries: weakref.WeakKeyDictionary[ProcessGroup, GroupEntry] = weakref.WeakKeyDictionary()
_lock = threading.Lock()  # guards changes of _entries


def issue(group: ProcessGroup | None, message: Message) -> Step | None:
    """Issue through shared memory; return None if Gloo or NCCL carries it.

    The first call of a group is a collective over Gloo.  Raises TransportUnavailable, SharedMemoryFailed.
    """
    payload = message.payload
    if payload is not None and not is_supported(payload.dtype, reduced=message.reduction is not None):
        return None
    if payload is not None and payload.device.type != "cpu":
        return None
    found = transport_of(group)
    return None if found is None else found.issue(message)


def transport_of(group: ProcessGroup | None) -> GroupTransport | None:
    """Return the transport of a group that shares memory, wholly or in part; None for others.

    The first use sets it up: a collective.  Raises TransportUnavailable if a rank requires shared memory and the
    group cannot have it.
    """
    group = _resolved(group)
    entry = _entry(group)
    if entry.transport is None and not entry.reason:
        with entry.lock:
            if entry.transport is None and not entry.reason:
                _set_up(group, entry)
    if entry.error is not None:
        raise entry.error
    return entry.transport


def derived_groups(group: ProcessGroup | None) -> dict[str, ProcessGroup]:
    """Groups made of the ranks of `group`, which end with it."""
    return _entry(_resolved(group)).derived_groups


def transport(group: ProcessGroup | None = None) -> str:
    """Name of the transport that carries the CPU tensors of `group`.

    "shared memory" on one host, "shared memory + gloo" on several with equally many ranks, "gloo", "nccl", or "none"
    for a world of one, where nothing is sent, and before the group's first collective, which decides.  Local: never
    waits for another rank.
    """
    return _description(group)[0]


def transport_reason(group: ProcessGroup | None = None) -> str:
    """Reason for which `transport(group)` was chosen."""
    return _description(group)[1]


def close_all() -> None:
    """Close the transports of all groups of this process."""
    with _lock:
        entries = list(_entries.values())
        _entries.clear()
    for entry in entries:
        if entry.transport is not None:
            entry.transport.close()


def _entry(group: ProcessGroup) -> GroupEntry:
    entry = _entries.get(group)
    if entry is None:
        with _lock:
            entry = _entries.setdefault(group, GroupEntry())
    return entry


def _resolved(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    world = dist.group.WORLD
    assert world is not None, "a world of one needs no transport"
    return world


def _set_up(group: ProcessGroup, entry: GroupEntry) -> None:
    """Negotiate with the other ranks, once."""
    _close_destroyed()
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if "gloo" not in dist.get_backend_config(group):
        entry.reason = f"its back end is {dist.get_backend(group)}"
        return
    timeout_s = compat.group_timeout_s(group, torch.device("cpu"), default=_DEFAULT_TIMEOUT_S)
    try:
        outcome = handshake.negotiate(group, rank, size, timeout_s)
    except handshake.TransportUnavailable as error:
        entry.reason, entry.error = str(error), error
        return
    if isinstance(outcome, str):
        entry.reason = outcome
        if rank == 0 and not outcome.endswith(_EXPECTED_REASON):
            warnings.warn(f"zcomm uses Gloo where shared memory would be faster: {outcome}.", stacklevel=2)
        return
    ranks = tuple(dist.get_process_group_ranks(group))
    if isinstance(outcome, handshake.TwoLevelMembers):
        entry.transport = _hierarchy(outcome, ranks, rank, timeout_s)
    else:
        entry.transport = Transport.open(library(), outcome, ranks, timeout_s)
    weakref.finalize(group, entry.transport.close)


def _hierarchy(
    found: handshake.TwoLevelMembers, ranks: tuple[int, ...], rank: int, timeout_s: float
) -> HierarchicalTransport:
    """Open the two-level transport."""
    host, index = found.layout.locate(rank)
    here = tuple(ranks[place] for place in found.layout.hosts[host])
    memory = Transport.open(library(), found.members, here, timeout_s)
    return HierarchicalTransport.of(Levels(memory, found.network, found.layout, host, index))


def _close_destroyed() -> None:
    """Close the transports of groups that torch has destroyed while references remain."""
    for group, entry in list(_entries.items()):
        if entry.transport is not None and not _is_known(group):
            entry.transport.close()


def _is_known(group: ProcessGroup) -> bool:
    try:
        return bool(dist.get_process_group_ranks(group))
    except (KeyError, ValueError):
        return False


def _description(group: ProcessGroup | None) -> tuple[str, str]:
    if not dist.is_initialized():
        return "none", "torch.distributed is not initialised: a world of one"
    if dist.get_world_size(group) == 1:
        return "none", "the group has one rank"
    if "gloo" not in dist.get_backend_config(group):
        return "nccl", f"its back end is {dist.get_backend(group)}"
    entry = _entries.get(_resolved(group))
    if entry is None or (entry.transport is None and not entry.reason):
        return "none", "not decided yet: the group has not communicated"
    if entry.error is not None:
        return "none", entry.reason
    if entry.transport is not None:
        return entry.transport.describe()
    return "gloo", entry.reason
