"""`deepspeed.utils.logger`: zengine's own logger, so that setting its level works."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from zengine.deepspeed.comm.world import get_rank

__all__ = ["log_dist", "logger", "set_log_level"]

logger = logging.getLogger("zengine")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks: [-1] is all ranks, None is rank 0."""
    rank, wanted = get_rank(), list(ranks or [0])
    if -1 in wanted or rank in wanted:
        logger.log(level, "[rank %d] %s", rank, message)


def set_log_level(level: str | int) -> None:
    """Set the level of `logger`."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)
