"""Handshake: the ranks of a group decide together whether to use shared memory.

A rank that decided alone would leave the others waiting, so every rank takes part.  In the first round each
rank sends its process, its host and an offer of its control segment; in the second, whether it could map all offers.
The decision is a pure function of what all ranks sent, so it is the same on all.  The rounds use the group's own Gloo
back end and fixed-length JSON.

In a group with ranks on several hosts, the ranks of each host map each other's memory, and those of equal index
connect over Gloo after the second round, when no peer can be missing.  A third round says whether all could connect.
Connecting gives up well before the group's time limit, so a failed connection is a reason like any other.

Rejected: deciding from environment variables alone (ranks may have different ones); a store (groups made by torch do
not expose theirs).
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, TypeVar, final

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from zcomm import compat, gloo
from zcomm.hangs.observer import ABORTED, observer
from zcomm.hosts import this_host
from zcomm.shared.host_layout import HostLayout
from zcomm.shared.native import Library, library, unavailable_reason
from zcomm.shared.network import Network
from zcomm.shared.segment import Memory, Offer, Segment

__all__ = [
    "Members",
    "Presence",
    "TwoLevelMembers",
    "all_gather_json",
    "negotiate",
    "obstacle_of",
    "rank_limit_obstacle",
]

VARIABLE = "ZCOMM_TRANSPORT"
CHOICES = ("auto", "shared", "gloo")
_MESSAGE_BYTES = 2048  # enough: texts are cut to a few hundred characters


@attrs.frozen
class Presence:
    """Message of one rank in the first round."""

    choice: str  # of CHOICES
    host: str  # equal on two ranks of one host
    pid: int
    obstacle: str  # reason for which this rank cannot use shared memory; ""
    offer: Offer | None  # its control segment; None exactly if there is an obstacle

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Presence:
        offer = fields.pop("offer")
        return cls(**fields, offer=None if offer is None else Offer(**offer))


@final
@attrs.define(eq=False)
class Members:
    """The ranks that share memory, as this rank sees them: of a group, or of its part on this host."""

    rank: int  # among them
    pids: list[int]
    controls: list[Memory]  # of all ranks, mapped
    pidfds: list[int]  # readable once the process has ended; -1 for this rank, and on old kernels

    def close(self) -> None:
        """Unmap the memory and close the descriptors."""
        self.controls.clear()
        while self.pidfds:
            descriptor = self.pidfds.pop()
            if descriptor >= 0:
                os.close(descriptor)


@final
@attrs.frozen(eq=False)
class TwoLevelMembers:
    """Both levels of a group with ranks on several hosts, as this rank sees them."""

    members: Members  # of this host
    network: Network  # to the ranks of equal index on other hosts
    layout: HostLayout

    def close(self) -> None:
        self.members.close()
        self.network.close()


_Connections = TypeVar("_Connections", Members, TwoLevelMembers)


class TransportUnavailable(RuntimeError):
    """Raised when a rank requires shared memory (ZCOMM_TRANSPORT=shared) and the group cannot have it."""


def negotiate(group: ProcessGroup, rank: int, size: int, timeout_s: float) -> Members | TwoLevelMembers | str:
    """Return the members of a group that shares memory, or the reason for which it uses Gloo.

    A collective over Gloo.  timeout_s: time limit of a message between hosts.
    Raises TransportUnavailable on every rank if one has ZCOMM_TRANSPORT=shared and the group cannot share memory.
    """
    segment, obstacle = _control_segment()
    try:
        mine = Presence(_choice(), _host(), os.getpid(), obstacle, None if segment is None else segment.offer())
        presences = [Presence.from_json(each) for each in all_gather_json(attrs.asdict(mine), group, size)]
        outcome: Members | TwoLevelMembers | str = obstacle_of(presences)
        if segment is not None and not outcome:
            layout = HostLayout.of([each.host for each in presences])
            outcome = rank_limit_obstacle(layout, library().lib.zs_max_ranks())
            outcome = outcome or _further_rounds(group, _FirstRound(presences, layout, rank, segment), timeout_s)
    finally:
        if segment is not None:
            segment.seal()
    if isinstance(outcome, str) and any(each.choice == "shared" for each in presences):
        raise TransportUnavailable(f"{VARIABLE}=shared, but the group cannot use shared memory: {outcome}")
    return outcome


def obstacle_of(presences: list[Presence]) -> str:
    """Reason for which these ranks cannot share memory; "" if they can.  Pure."""
    for number, each in enumerate(presences):
        if each.choice not in CHOICES:
            return f"rank {number} has {VARIABLE}={each.choice}; allowed: {', '.join(CHOICES)}"
        if each.choice == "gloo":
            return f"rank {number} has {VARIABLE}=gloo"
        if each.obstacle:
            return f"rank {number}: {each.obstacle}"
    layout = HostLayout.of([each.host for each in presences])
    is_wanted = any(each.choice == "shared" for each in presences)
    return layout.obstacle() or (layout.shares_nothing() if is_wanted else "")


def rank_limit_obstacle(layout: HostLayout, most: int) -> str:
    """Reason if a host has more than `most` ranks of the group; else "".  Pure."""
    where = "" if layout.num_hosts == 1 else " on each host"
    found = layout.ranks_per_host
    return f"{found} ranks{where} are in the group; at most {most} can share memory" if found > most else ""


def all_gather_json(value: Any, group: ProcessGroup, size: int) -> list[Any]:
    """Gather small JSON values of all ranks, over Gloo.  Raises RuntimeError once the world is aborted."""
    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    assert len(data) <= _MESSAGE_BYTES, f"{len(data)} bytes of JSON"
    mine = torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    output = torch.empty(size * _MESSAGE_BYTES, dtype=torch.uint8)
    work = compat.all_gather_flat(output, mine, group=group, async_op=True)
    while not gloo.wait_slice(work):
        if observer().is_aborted():
            raise RuntimeError(ABORTED)
    return [json.loads(bytes(row.tolist())) for row in output.view(size, -1)]


def _choice() -> str:
    return os.environ.get(VARIABLE, "").strip().lower()[:40] or "auto"


def _host() -> str:
    """ZCOMM_HOST, else the identity from `hosts.py`, else the host name."""
    return (os.environ.get("ZCOMM_HOST") or this_host() or socket.gethostname())[:100]


def _control_segment() -> tuple[Segment | None, str]:
    """Create this rank's control segment; return it, or the reason for which shared memory is unavailable here."""
    obstacle = unavailable_reason()
    if obstacle:
        return None, obstacle[:300]
    try:
        return Segment.create(library(), library().lib.zs_control_bytes()), ""
    except OSError as error:
        return None, f"no memory for its control segment ({error})"[:300]


@attrs.frozen(eq=False)
class _FirstRound:
    """Result of the first round."""

    presences: list[Presence]  # by group rank
    layout: HostLayout
    rank: int
    own: Segment


def _further_rounds(group: ProcessGroup, first: _FirstRound, timeout_s: float) -> Members | TwoLevelMembers | str:
    """Run the further rounds; return this rank's connections if every rank has all of its own, else the reason."""
    size = len(first.presences)
    members = _confirm(group, size, *_map_members(library(), first))
    if isinstance(members, str) or first.layout.num_hosts == 1:
        return members
    return _confirm(group, size, *_connect_hosts(group, first, members, timeout_s))


def _confirm(group: ProcessGroup, size: int, own: _Connections | None, problem: str) -> _Connections | str:
    """Run one round: return `own` if every rank succeeded; else close it and return the reason."""
    reason = "a round failed"  # replaced if it succeeds
    try:
        problems = all_gather_json(problem, group, size)
        reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
    finally:
        if own is not None and reason:
            own.close()
    return reason if own is None or reason else own


def _map_members(found: Library, first: _FirstRound) -> tuple[Members | None, str]:
    """Map the members' memory on this host; return them, or the problem."""
    host, index = first.layout.locate(first.rank)
    here = first.layout.hosts[host]
    members = Members(index, [first.presences[number].pid for number in here], [], [])
    try:
        for number in here:
            offer, is_own = first.presences[number].offer, number == first.rank
            members.pidfds.append(-1 if is_own else _pidfd(first.presences[number].pid))
            assert offer is not None
            members.controls.append(first.own.memory if is_own else offer.accept(found))
    except OSError as error:
        missed = here[len(members.controls)]
        members.close()
        return None, f"cannot reach the memory of rank {missed} ({error})"[:300]
    return members, ""


def _connect_hosts(
    group: ProcessGroup, first: _FirstRound, members: Members, timeout_s: float
) -> tuple[TwoLevelMembers | None, str]:
    """Connect the two levels; return them, or the reason for which this rank cannot reach the other hosts."""
    host, index = first.layout.locate(first.rank)
    peers, ranks = first.layout.peers(index), dist.get_process_group_ranks(group)
    offer = first.presences[peers[0]].offer
    assert offer is not None
    try:
        network = Network.open(offer.token, tuple(ranks[peer] for peer in peers), host, timeout_s)
    except RuntimeError as error:
        members.close()
        return None, f"cannot reach its peers on other hosts ({(str(error).splitlines() or [''])[0]})"[:300]
    return TwoLevelMembers(members, network, first.layout), ""


def _pidfd(pid: int) -> int:
    """Open a descriptor that becomes readable when the process ends; -1 on kernels before 5.3."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
