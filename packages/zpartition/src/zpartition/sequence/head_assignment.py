"""Head assignment: the heads of an attention that each sequence rank computes.  Arithmetic, without processes.

Query heads are split into runs, as even as possible: of 6 over 4 ranks 2, 2, 1, 1.  A rank also gets the key-value
heads that its queries attend to, so if there are fewer of those than ranks some go to several.  If its queries share
them unevenly (of 6 queries on 3 key-value heads the first rank of two has 0, 0, 1) they are repeated for each query
after they arrived, and the attention there is a plain one: no repeated heads are sent.

Rejected: repeating key-value heads before they are sent; assigning whole groups, by which all ranks wait for those
with one group more.
"""

from __future__ import annotations

from typing import final

import attrs

__all__ = ["HeadAssignment"]


@final
@attrs.frozen
class HeadAssignment:
    """Assignment of `num_query` heads, which share `num_key_value` heads evenly, to `size` ranks."""

    num_query: int
    num_key_value: int
    size: int

    def __attrs_post_init__(self) -> None:
        """Raise ValueError if the numbers do not match, or there are too few heads."""
        if self.num_key_value < 1 or self.num_query % self.num_key_value:
            raise ValueError(
                f"{self.num_query} query heads do not share {self.num_key_value} key-value heads evenly: the first "
                "number must be a multiple of the second."
            )
        if self.num_query < self.size:
            raise ValueError(
                f"{self.num_query} query heads cannot be split over {self.size} sequence ranks: each rank needs one. "
                f"Use at most {self.num_query} ranks, or ring_attention, which splits no heads."
            )

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_query // self.num_key_value

    def query(self, rank: int) -> range:
        """Query heads of a rank."""
        each, more = divmod(self.num_query, self.size)
        start = rank * each + min(rank, more)
        return range(start, start + each + (rank < more))

    def key_value(self, rank: int) -> range:
        """Key-value heads that the rank's query heads attend to."""
        mine = self.query(rank)
        return range(mine[0] // self.group, mine[-1] // self.group + 1)

    def repeats(self, rank: int) -> tuple[int, ...]:
        """Return the key-value head, counted in `key_value`, of each query head of a rank; () if they share evenly.

        Evenly means as attentions assume it: equally many consecutive queries for each.
        """
        mine, first = self.query(rank), self.key_value(rank)[0]
        wanted = tuple(head // self.group - first for head in mine)
        each = len(mine) // len(self.key_value(rank))
        is_even = wanted == tuple(place // each for place in range(len(mine))) and len(mine) % each == 0
        return () if is_even and len(set(wanted)) * each == len(mine) else wanted

    def queries(self) -> tuple[range, ...]:
        """Query heads of all ranks."""
        return tuple(map(self.query, range(self.size)))

    def key_values(self) -> tuple[range, ...]:
        """Key-value heads of all ranks."""
        return tuple(map(self.key_value, range(self.size)))
