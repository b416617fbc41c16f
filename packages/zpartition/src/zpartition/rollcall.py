"""Once a step the ranks tell each other which parameters they have unfrozen.

Problem.  What was unfrozen gets buckets, by all ranks together.  If only some have unfrozen something, the others do
not know that there is anything to agree on: they go on to the gradients, and both wait for what never comes.

Design.  Where there are frozen parameters and other ranks, each rank says in the first forward pass of a step what it
has found, 16 bytes on the host, and waits for nobody.  A rank that has found something hears the others at once; one
that has not hears them where it would wait for them anyway, before its first gradients leave (at stage 3 before its
first weights are gathered).  So all are told.

Rejected: a message at every forward (evaluation runs on one rank alone); a message only if something was found (the
others cannot answer); the statistics at the boundary, which come too late by a step.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

import zcomm

__all__ = ["RollCall"]


@final
@attrs.define(eq=False)
class RollCall:
    """What this rank has said in this step, and whether it has heard the others.  Without a group, the identity.

    Invariant: every rank says something once between two calls of `turn`, and again only if it finds others.
    """

    group: ProcessGroup | None  # on the host, of all ranks that train; None: nobody to tell, or nothing frozen
    names: tuple[str, ...] | None = None  # that were told in this step; None: nothing yet
    bounds: Tensor | None = None  # (2,) int64: largest digest of all ranks, and of the negatives
    handle: zcomm.Handle | None = None  # not heard yet

    def tell(self, names: Sequence[str]) -> None:
        """Say once a step what this rank has unfrozen."""
        if self.group is None or self.names == tuple(names):
            return
        self.hear()
        digest = zlib.crc32("\n".join(names).encode())
        self.names, self.bounds = tuple(names), torch.tensor([digest, -digest], dtype=torch.int64)
        self.handle = zcomm.all_reduce(self.bounds, self.group, op="max", async_op=True, label="unfrozen parameters")

    def hear(self) -> None:
        """Wait for the others, if they have not been heard in this step.

        Raises:
            ValueError: ranks have unfrozen different parameters; on all of them.
        """
        if self.handle is None:
            return
        assert self.bounds is not None and self.names is not None, "a handle belongs to what was told"
        names, self.names = self.names, None
        self.handle.wait()
        self.handle = None
        largest, smallest = self.bounds.tolist()
        if largest != -smallest:
            mine = f"{', '.join(names[:10])} ({len(names)} in all)" if names else "none"
            raise ValueError(
                f"ranks have unfrozen different parameters: this one, rank {zcomm.group_rank(self.group)}, {mine}. "
                "Set requires_grad alike on all ranks."
            )
        self.names = names

    def turn(self) -> None:
        """A step ends on all ranks."""
        self.hear()
        self.names = None
