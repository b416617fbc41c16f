"""`dump_state`: print at start what the engine is going to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from zengine.features.base import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine


@final
class DumpState(Feature):
    """Prints the resolved plan, with the origin of every value, and the bytes by owner; on rank 0."""

    def attach(self, engine: Engine) -> None:
        if engine.parts.world.rank != 0:
            return
        print(engine.plan.describe())
        for owner, num_bytes in engine.parts.partition.ledger().items():
            print(f"{owner}: {num_bytes / 2**20:,.1f} MiB on rank 0")
