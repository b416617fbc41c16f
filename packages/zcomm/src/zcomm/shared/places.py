"""Where the ranks of a group are, and whether its collectives can go in two levels.

Two levels want the same number of ranks on every host, because the ranks of equal index (first, second, ... of their
host) make the groups between hosts, and each carries its share of the bytes.  On each host they must stand evenly
spaced in the group, as launchers place them: host after host (0 1 | 2 3) or in turn (0 2 | 1 3).  Then what the ranks
of one host send or receive of a tensor lies in slices at one distance, which C walks without a copy.

Rejected: any placement, with the slices permuted through a buffer; nobody places ranks like that, and Gloo works.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = ["APART", "Places"]

APART = "is on a host of its own"  # the end of an obstacle where no two ranks share a host

_TOLD = 4  # hosts that an obstacle lists


@attrs.frozen
class Places:
    """The ranks of a group by host.  Ranks are places in the group.

    Invariant: every rank of the group is in exactly one host; ranks ascend in a host, hosts by their first rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> Places:
        """From the name of each rank's host."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def num_here(self) -> int:
        """Ranks of each host, where they are even."""
        return len(self.hosts[0])

    def find(self, rank: int) -> tuple[int, int]:
        """(host, index in it) of a rank."""
        host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def across(self, index: int) -> tuple[int, ...]:
        """The ranks of this index, one of each host."""
        return tuple(ranks[index] for ranks in self.hosts)

    def distance(self, host: int) -> int:
        """How far apart the ranks of a host stand in the group."""
        ranks = self.hosts[host]
        return ranks[1] - ranks[0] if len(ranks) > 1 else 1

    def obstacle(self) -> str:
        """Why the group can neither share memory wholly nor go in two levels; "" if it can."""
        if self.num_hosts == 1:
            return ""
        if all(len(ranks) == 1 for ranks in self.hosts):
            return f"each of its {self.num_hosts} ranks {APART}"
        if len({len(ranks) for ranks in self.hosts}) > 1:
            counts = [f"{len(ranks)} on that of rank {ranks[0]}" for ranks in self.hosts[:_TOLD]]
            more = f" and {self.num_hosts - _TOLD} hosts more" if self.num_hosts > _TOLD else ""
            return f"its hosts have different numbers of ranks: {', '.join(counts)}{more}"
        for host, ranks in enumerate(self.hosts):
            if ranks != tuple(range(ranks[0], ranks[-1] + 1, self.distance(host))):
                return f"ranks {', '.join(map(str, ranks))} share a host and are not evenly spaced in the group"
        return ""
