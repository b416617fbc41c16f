"""How the ranks of a group find out, together, whether shared memory will do.

A rank that decided alone would leave the others waiting, so every rank always takes part, whatever it knows already:
one round says who and where each is and offers the control segment, a second says whether all offers could be
taken.  The verdict is a pure function of what all said, so all come to the same.  The rounds travel over the
group's own Gloo back end as fixed-length JSON.

In a group with ranks on several hosts the ranks of each host meet in memory, and those of equal index connect over
Gloo after the second round, when nobody is missing whom they would wait for.  A third says whether all could connect;
they give up well before its time limit, so a connection which does not come about is a reason like any other.

Rejected: deciding from environment variables alone (nothing says that ranks have the same), a store (groups made by
torch do not show theirs).
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

from zcomm import compat
from zcomm.hosts import this_host
from zcomm.shared.native import Library, library, reason_without
from zcomm.shared.network import Network
from zcomm.shared.places import Places
from zcomm.shared.segment import Memory, Offer, Segment

__all__ = ["Linked", "Members", "Presence", "agree", "crowd", "gathered", "verdict"]

VARIABLE = "ZCOMM_TRANSPORT"
CHOICES = ("auto", "shared", "gloo")
_MESSAGE_BYTES = 2048  # more than the texts in it can have: they are cut to a few hundred characters


@attrs.frozen
class Presence:
    """What one rank says of itself in the first round."""

    choice: str  # of CHOICES
    host: str  # equal on two ranks if they run on one host
    pid: int
    obstacle: str  # why this rank cannot use shared memory; "" if it can
    offer: Offer | None  # its control segment; None exactly if there is an obstacle

    @classmethod
    def parsed(cls, said: dict[str, Any]) -> Presence:
        offer = said.pop("offer")
        return cls(**said, offer=None if offer is None else Offer(**offer))


@final
@attrs.define(eq=False)
class Members:
    """The ranks that share memory, as this one sees them: of a group, or of its part on this host."""

    rank: int  # among them
    pids: list[int]
    controls: list[Memory]  # of all ranks, mapped
    pidfds: list[int]  # readable when the process has ended; -1 for this rank, and where the kernel has none

    def close(self) -> None:
        """Undo the mappings and close the descriptors."""
        self.controls.clear()
        while self.pidfds:
            descriptor = self.pidfds.pop()
            if descriptor >= 0:
                os.close(descriptor)


@final
@attrs.frozen(eq=False)
class Linked:
    """The two levels of a group with ranks on several hosts, as this rank sees them."""

    members: Members  # of this host
    network: Network  # to the ranks of this index on other hosts
    places: Places

    def close(self) -> None:
        self.members.close()
        self.network.close()


_Held = TypeVar("_Held", Members, Linked)


class TransportRefused(RuntimeError):
    """A rank insists on shared memory, and the group cannot have it."""


def agree(group: ProcessGroup, rank: int, size: int, timeout_s: float) -> Members | Linked | str:
    """A collective over Gloo: the members of a group that shares memory, or the reason why it uses Gloo.

    timeout_s: how long a message between hosts may take.
    Raises TransportRefused on every rank if one of them has ZCOMM_TRANSPORT=shared and it cannot be.
    """
    segment, obstacle = _control_segment()
    try:
        mine = Presence(_choice(), _host(), os.getpid(), obstacle, None if segment is None else segment.offer())
        said = [Presence.parsed(each) for each in gathered(attrs.asdict(mine), group, size)]
        outcome: Members | Linked | str = verdict(said)
        if segment is not None and not outcome:
            places = Places.of([each.host for each in said])
            outcome = crowd(places, library().lib.zs_max_ranks())
            outcome = outcome or _met_by_all(group, _Meeting(said, places, rank, segment), timeout_s)
    finally:
        if segment is not None:
            segment.seal()
    if isinstance(outcome, str) and any(each.choice == "shared" for each in said):
        raise TransportRefused(f"{VARIABLE}=shared, but the group cannot use shared memory: {outcome}")
    return outcome


def verdict(said: list[Presence]) -> str:
    """Why ranks that said this cannot share memory; "" if nothing speaks against it.  Pure."""
    for number, each in enumerate(said):
        if each.choice not in CHOICES:
            return f"rank {number} has {VARIABLE}={each.choice}; allowed: {', '.join(CHOICES)}"
        if each.choice == "gloo":
            return f"rank {number} has {VARIABLE}=gloo"
        if each.obstacle:
            return f"rank {number}: {each.obstacle}"
    return Places.of([each.host for each in said]).obstacle()


def crowd(places: Places, most: int) -> str:
    """Why a host has too many ranks, if more than `most` of them are to share memory; else "".  Pure."""
    where = "" if places.num_hosts == 1 else " on each host"
    found = places.num_here
    return f"{found} ranks{where} are in the group; at most {most} can share memory" if found > most else ""


def gathered(value: Any, group: ProcessGroup, size: int) -> list[Any]:
    """Every rank's small JSON value, over Gloo."""
    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    assert len(data) <= _MESSAGE_BYTES, f"{len(data)} bytes of JSON"
    mine = torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    output = torch.empty(size * _MESSAGE_BYTES, dtype=torch.uint8)
    compat.all_gather_flat(output, mine, group=group, async_op=True).wait()
    return [json.loads(bytes(row.tolist())) for row in output.view(size, -1)]


def _choice() -> str:
    return os.environ.get(VARIABLE, "").strip().lower()[:40] or "auto"


def _host() -> str:
    """ZCOMM_HOST, else what `hosts.py` makes of the kernel and its pids, else the host's name."""
    return (os.environ.get("ZCOMM_HOST") or this_host() or socket.gethostname())[:100]


def _control_segment() -> tuple[Segment | None, str]:
    """This rank's control segment, or what it knows already that speaks against shared memory."""
    obstacle = reason_without()
    if obstacle:
        return None, obstacle[:300]
    try:
        return Segment.create(library(), library().lib.zs_control_bytes()), ""
    except OSError as error:
        return None, f"no memory for its control segment ({error})"[:300]


@attrs.frozen(eq=False)
class _Meeting:
    """What the first round has brought."""

    said: list[Presence]  # by rank of the group
    places: Places
    rank: int
    own: Segment


def _met_by_all(group: ProcessGroup, meeting: _Meeting, timeout_s: float) -> Members | Linked | str:
    """The further rounds: what this rank has, if every rank reached all that it must, else why not."""
    size = len(meeting.said)
    members = _held_by_all(group, size, *_met(library(), meeting))
    if isinstance(members, str) or meeting.places.num_hosts == 1:
        return members
    return _held_by_all(group, size, *_linked(group, meeting, members, timeout_s))


def _held_by_all(group: ProcessGroup, size: int, held: _Held | None, problem: str) -> _Held | str:
    """One round: what this rank holds, if every rank holds its own, else why not; then it lets go."""
    reason = "a round failed"  # unless it does not
    try:
        problems = gathered(problem, group, size)
        reason = next((f"rank {number}: {text}" for number, text in enumerate(problems) if text), "")
    finally:
        if held is not None and reason:
            held.close()
    return reason if held is None or reason else held


def _met(found: Library, meeting: _Meeting) -> tuple[Members | None, str]:
    """The members on this host, or what went wrong here."""
    host, index = meeting.places.find(meeting.rank)
    here = meeting.places.hosts[host]
    members = Members(index, [meeting.said[number].pid for number in here], [], [])
    try:
        for number in here:
            offer, is_own = meeting.said[number].offer, number == meeting.rank
            members.pidfds.append(-1 if is_own else _pidfd(meeting.said[number].pid))
            assert offer is not None
            members.controls.append(meeting.own.memory if is_own else offer.accept(found))
    except OSError as error:
        missed = here[len(members.controls)]
        members.close()
        return None, f"cannot reach the memory of rank {missed} ({error})"[:300]
    return members, ""


def _linked(group: ProcessGroup, meeting: _Meeting, members: Members, timeout_s: float) -> tuple[Linked | None, str]:
    """The two levels, or why this rank cannot reach the other hosts."""
    host, index = meeting.places.find(meeting.rank)
    peers, ranks = meeting.places.across(index), dist.get_process_group_ranks(group)
    offer = meeting.said[peers[0]].offer
    assert offer is not None
    try:
        network = Network.open(offer.token, tuple(ranks[peer] for peer in peers), host, timeout_s)
    except RuntimeError as error:
        members.close()
        return None, f"cannot reach its peers on other hosts ({(str(error).splitlines() or [''])[0]})"[:300]
    return Linked(members, network, meeting.places), ""


def _pidfd(pid: int) -> int:
    """A descriptor that becomes readable when the process ends; -1 on a kernel without such (before 5.3)."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return -1
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError:
        return -1
