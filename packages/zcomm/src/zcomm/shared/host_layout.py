"""Host layout: the ranks of a group by host, and the placements that two-level collectives support.

Two levels require the same number of ranks on every host, because the ranks of equal index (first, second, ... of
their host) communicate between hosts, each with its share of the bytes.  On each host the ranks must be evenly spaced
in the group, as launchers place them: host after host (0 1 | 2 3) or round-robin (0 2 | 1 3).  Then the slices of a
host's ranks in a tensor lie at one stride, which C walks without a copy.

Rejected: arbitrary placement, with the slices permuted through a buffer (no launcher places ranks like that, and Gloo
handles it).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

__all__ = ["HostLayout"]

_MAX_LISTED = 4  # hosts in an obstacle's text


@attrs.frozen
class HostLayout:
    """Ranks of a group by host, numbered within the group.

    Invariant: every rank of the group is on exactly one host; ranks ascend on a host, hosts by their first rank.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[str]) -> HostLayout:
        """Build the layout from the host name of each rank."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, found.values())))

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host, if even."""
        return len(self.hosts[0])

    def locate(self, rank: int) -> tuple[int, int]:
        """Return (host, index on it) of a rank."""
        host = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return host, self.hosts[host].index(rank)

    def peers(self, index: int) -> tuple[int, ...]:
        """Ranks of this index, one on each host."""
        return tuple(ranks[index] for ranks in self.hosts)

    def stride(self, host: int) -> int:
        """Distance between neighbouring ranks of a host in the group."""
        ranks = self.hosts[host]
        return ranks[1] - ranks[0] if len(ranks) > 1 else 1

    def shares_nothing(self) -> str:
        """Reason for which no two ranks share memory; "" if some do."""
        is_spread = self.num_hosts > 1 and max(map(len, self.hosts)) == 1
        return f"each of its {self.num_hosts} ranks is on a host of its own" if is_spread else ""

    def obstacle(self) -> str:
        """Reason for which the group can use neither shared memory nor the levels; "" if it can."""
        if self.num_hosts == 1:
            return ""
        if len({len(ranks) for ranks in self.hosts}) > 1:
            counts = [f"{len(ranks)} on that of rank {ranks[0]}" for ranks in self.hosts[:_MAX_LISTED]]
            more = f" and {self.num_hosts - _MAX_LISTED} hosts more" if self.num_hosts > _MAX_LISTED else ""
            return f"its hosts have different numbers of ranks: {', '.join(counts)}{more}"
        for host, ranks in enumerate(self.hosts):
            if ranks != tuple(range(ranks[0], ranks[-1] + 1, self.stride(host))):
                return f"ranks {', '.join(map(str, ranks))} share a host and are not evenly spaced in the group"
        return ""
