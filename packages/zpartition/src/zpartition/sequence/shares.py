"""Which heads of an attention each sequence rank computes: arithmetic, without processes.

Query heads are runs, as even as they can be: of 6 over 4 ranks 2, 2, 1, 1.  A rank also gets the key-value heads that
its queries attend to, so where there are fewer of those than ranks some go to several.  Where its queries share them
unevenly (of 6 queries on 3 key-value heads the first rank of two has 0, 0, 1) they are repeated once for each query
after they arrived, and the attention there is a plain one: nothing that is repeated travels.

Rejected: repeating key-value heads before they are sent, and sharing out whole groups, by which ranks with one group
more wait for nobody and everybody waits for them.
"""

from __future__ import annotations

from typing import final

import attrs

__all__ = ["HeadShares"]


@final
@attrs.frozen
class HeadShares:
    """Of `num_query` heads, of which equally many share each of the `num_key_value` ones, over `size` ranks."""

    num_query: int
    num_key_value: int
    size: int

    def __attrs_post_init__(self) -> None:
        """Raise ValueError if there are no such heads, or too few."""
        if self.num_key_value < 1 or self.num_query % self.num_key_value:
            raise ValueError(
                f"{self.num_query} query heads do not share {self.num_key_value} key-value heads evenly: the first "
                "number has to be a multiple of the second."
            )
        if self.num_query < self.size:
            raise ValueError(
                f"{self.num_query} query heads cannot be shared out over {self.size} sequence ranks: each needs one. "
                f"Use at most {self.num_query} ranks, or ring_attention, which splits no heads."
            )

    @property
    def group(self) -> int:
        """Query heads that share one of key and value."""
        return self.num_query // self.num_key_value

    def query(self, rank: int) -> range:
        """The query heads of a rank."""
        each, more = divmod(self.num_query, self.size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def key_value(self, rank: int) -> range:
        """The heads of key and value that those attend to."""
        mine = self.query(rank)
        return range(mine[0] // self.group, mine[-1] // self.group + 1)

    def repeats(self, rank: int) -> tuple[int, ...]:
        """For each query head of a rank its key-value head, counted in `key_value`; () if they share evenly.

        Evenly is what attentions take to be so: of queries in a row equally many for each.
        """
        mine, first = self.query(rank), self.key_value(rank)[0]
        wanted = tuple(head // self.group - first for head in mine)
        each = len(mine) // len(self.key_value(rank))
        is_even = wanted == tuple(place // each for place in range(len(mine))) and len(mine) % each == 0
        return () if is_even and len(set(wanted)) * each == len(mine) else wanted

    def queries(self) -> tuple[range, ...]:
        """Of all ranks."""
        return tuple(map(self.query, range(self.size)))

    def key_values(self) -> tuple[range, ...]:
        """Of all ranks."""
        return tuple(map(self.key_value, range(self.size)))
