"""Recorded collectives, to count and order them in tests.

with recorded() as communication:
    engine.step()
assert communication.ops == ["reduce_scatter", "all_reduce", "all_gather"]
assert communication.nbytes("reduce_scatter") == 4 * layout.numel
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import attrs

from zcomm.collectives.trace import Record, traced

__all__ = ["Recording", "recorded"]


@final
@attrs.define(eq=False)
class Recording:
    """Collectives of this process that were issued inside the block and have been waited for."""

    delivered: list[Record] = attrs.field(factory=list)  # in the order of the waits

    @property
    def records(self) -> list[Record]:
        """Records in the order of issue."""
        return sorted(self.delivered, key=lambda record: record.index)

    @property
    def ops(self) -> list[str]:
        """Names in the order of issue, such as ["reduce_scatter", "all_gather"]."""
        return [record.op for record in self.records]

    @property
    def labels(self) -> list[str]:
        """The callers' labels in the order of issue."""
        return [record.label for record in self.records]

    def count(self, op: str | None = None) -> int:
        """Number of collectives of kind `op`; of any kind if None."""
        return sum(op in (None, record.op) for record in self.delivered)

    def nbytes(self, op: str | None = None) -> int:
        """Bytes of this rank's payloads of kind `op`; of any kind if None."""
        return sum(record.nbytes for record in self.delivered if op in (None, record.op))


@contextmanager
def recorded() -> Iterator[Recording]:
    """Record the collectives of this process.  At world size 1 there are none."""
    recording = Recording()
    with traced(recording.delivered):
        yield recording
