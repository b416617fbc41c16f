"""`deepspeed.utils.logger`: zengine's own logger, so that setting its level works.

Like DeepSpeed, functions with `ranks` act on all ranks without a process group.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from zengine.deepspeed.comm.world import get_rank, is_initialized

__all__ = [
    "LoggerFactory",
    "get_current_level",
    "get_dist_msg",
    "get_log_level_from_string",
    "log_dist",
    "log_dist_once",
    "log_levels",
    "logger",
    "print_configuration",
    "print_dist",
    "print_json_dist",
    "set_log_level",
    "set_log_level_from_string",
    "should_log_le",
    "warning_once",
]

log_levels = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
logger = logging.getLogger("zengine")
_FORMAT = "[%(asctime)s] [%(levelname)s] [%(filename)s:%(lineno)d:%(funcName)s] %(message)s"


class LoggerFactory:
    """Makes loggers like DeepSpeed's, which write to stdout."""

    @staticmethod
    def create_logger(name: str | None = None, level: int = logging.WARNING) -> logging.Logger:
        """Return the logger `name`, with a handler of its own.  Raises ValueError without a name."""
        if name is None:
            raise ValueError("name for logger cannot be None")
        made = logging.getLogger(name)
        made.setLevel(level)
        made.propagate = False
        handler: logging.StreamHandler[TextIO] = logging.StreamHandler(stream=sys.stdout)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter(_FORMAT))
        made.addHandler(handler)
        return made


def _is_wanted(ranks: Sequence[int] | None) -> bool:
    """Return True if this rank is one of `ranks`, if they begin with -1, or without a process group."""
    wanted = list(ranks or ())
    return not is_initialized() or wanted[:1] == [-1] or get_rank() in wanted


def get_dist_msg(message: str, ranks: Sequence[int] | None = None) -> str | None:
    """Return the message with its rank (-1 without a process group); None on ranks that are not wanted."""
    return f"[Rank {get_rank() if is_initialized() else -1}] {message}" if _is_wanted(ranks) else None


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks: [-1] is all ranks, None is rank 0."""
    if _is_wanted(ranks or [0]):
        logger.log(level, "[rank %d] %s", get_rank(), message)


def log_dist_once(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on these ranks, each message once in a process."""
    _log_dist_once(message, None if ranks is None else tuple(ranks), level)


@functools.cache
def _log_dist_once(message: str, ranks: tuple[int, ...] | None, level: int) -> None:
    log_dist(message, ranks, level)


@functools.cache
def warning_once(*args: Any, **kwargs: Any) -> None:
    """Log a warning, each message once in a process; also `logger.warning_once`."""
    logger.warning(*args, **kwargs)


def print_dist(message: str, ranks: Sequence[int] | None = None) -> None:
    """Print on these ranks, whatever the level of the logger."""
    text = get_dist_msg(message, ranks)
    if text is not None:
        print(text)


def print_json_dist(message: dict[str, Any], ranks: Sequence[int] | None = None, path: Any = None) -> None:
    """Write `message`, with "rank" added, as JSON to `path` on these ranks."""
    if _is_wanted(ranks):
        message["rank"] = get_rank() if is_initialized() else -1
        Path(path).write_text(json.dumps(message), encoding="utf-8")


def print_configuration(args: Any, name: str) -> None:
    """Log the attributes of an object, sorted, at level INFO."""
    values: Mapping[str, Any] = vars(args)
    logger.info("%s:", name)
    for key in sorted(values):
        logger.info("  %s %s %s", key, "." * (29 - len(key)), values[key])


def set_log_level(level: str | int) -> None:
    """Set the level of `logger`."""
    logger.setLevel(level.upper() if isinstance(level, str) else level)


def get_log_level_from_string(log_level_str: str) -> int:
    """Return logging's number of a level.  Raises ValueError for another name than those of `log_levels`."""
    try:
        return log_levels[log_level_str.lower()]
    except KeyError:
        raise ValueError(
            f"{log_level_str} is not one of the valid logging levels. Valid log levels are {list(log_levels)}."
        ) from None


def set_log_level_from_string(log_level_str: str, custom_logger: logging.Logger | None = None) -> None:
    """Set the level of `custom_logger` (default: `logger`) and of its handlers."""
    level, chosen = get_log_level_from_string(log_level_str), custom_logger or logger
    chosen.setLevel(level)
    for handler in chosen.handlers:
        handler.setLevel(level)


def get_current_level() -> int:
    """Return the level of `logger`, or that which it inherits."""
    return logger.getEffectiveLevel()


def should_log_le(max_log_level_str: str) -> bool:
    """Return True if the level of `logger` is at most this one: with "info", if it is INFO or DEBUG."""
    if not isinstance(max_log_level_str, str):
        raise ValueError(f"{max_log_level_str} is not a string")
    return get_current_level() <= get_log_level_from_string(max_log_level_str)


# Scripts call them on the logger.
logger.warning_once = warning_once  # type: ignore[attr-defined]
logger.log_dist_once = log_dist_once  # type: ignore[attr-defined]
