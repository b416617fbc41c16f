"""`deepspeed.comm.backend.Backend`: base class of communication back ends."""

from __future__ import annotations

from typing import Any

__all__ = ["Backend"]


class Backend:
    """Name, rank and size of a world of processes."""

    def __init__(self, name: str = "backend", rank: int = 0, size: int = 1) -> None:
        self.name = name
        self.world_group: Any = None
        self.world_size, self.world_rank = size, rank
        self.process_groups: list[Any] = []
        self.initialized = False

    def is_initialized(self) -> bool:
        return self.initialized

    def init_process_group(self) -> None:
        """Mark the world as initialized; a subclass creates it."""
        self.initialized = True
