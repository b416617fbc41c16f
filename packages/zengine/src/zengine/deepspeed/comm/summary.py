"""`deepspeed.comm.configure` and `log_summary`: statistics of the collectives of this process.

Like DeepSpeed, this keeps one logger per process: its functions have no argument that could carry one.  zcomm's
trace fills it with all collectives that go through zcomm, the engine's too; `timed_op` adds those of
torch.distributed, and a script's own.  An engine whose config has `comms_logger` counts by itself: until `configure`
is called, `log_summary` prints what it has counted, with mean latencies instead of each one.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, TypeVar

import zcomm
from zengine.deepspeed.accelerator.real_accelerator import get_accelerator
from zengine.deepspeed.comm.utils import get_debug_log_name, get_default_args, get_msg_size_from_args
from zengine.deepspeed.comm.world import get_rank
from zengine.deepspeed.utils.comms_logging import CommsLogger
from zengine.telemetry.stragglers import open_messages

__all__ = [
    "comms_logger",
    "configure",
    "get_comm_operation_count",
    "get_logged_comm_ops",
    "has_comm_data",
    "log_summary",
    "reset_log",
    "timed_op",
]

R = TypeVar("R")

comms_logger = CommsLogger()  # of this process
_tracing = ExitStack()  # zcomm's trace into it, while it is enabled
_GATHERING = ("all_gather", "all_gather_into_tensor", "all_gather_coalesced")
_OWN_NAMES = frozenset(
    {*_GATHERING, "all_reduce_coalesced", "inference_all_reduce", "reduce_scatter_tensor", "monitored_barrier"}
)


def configure(
    deepspeed_config: Any = None,
    enabled: bool | None = None,
    prof_all: bool | None = None,
    prof_ops: Iterable[str] | None = None,
    verbose: bool | None = None,
    debug: bool | None = None,
) -> None:
    """Start or stop recording this process's collectives; `prof_ops` names those to record if not `prof_all`.

    deepspeed_config: a dict with a `comms_logger` section, or an object with `comms_config` (a
    DeepSpeedCommsConfig).  The other arguments, if not None, override it.
    """
    if isinstance(deepspeed_config, Mapping):
        _apply(**{"enabled": False, "prof_all": True, "prof_ops": ()} | deepspeed_config.get("comms_logger", {}))
    elif deepspeed_config is not None and deepspeed_config.comms_config.comms_logger_enabled:
        comms_logger.configure(deepspeed_config.comms_config)
    chosen = {"enabled": enabled, "prof_all": prof_all, "prof_ops": prof_ops, "verbose": verbose, "debug": debug}
    _apply(**{name: value for name, value in chosen.items() if value is not None})
    _tracing.close()
    if comms_logger.enabled:
        _tracing.enter_context(zcomm.traced(_record))


def _apply(**settings: Any) -> None:
    for name, value in settings.items():
        setattr(comms_logger, name, list(value) if name == "prof_ops" else value)


def _record(record: Any) -> None:
    """Add a collective of zcomm, under the name of the verb that called it, or of its `log_name`."""
    named = record.label in _OWN_NAMES or record.label in comms_logger.prof_ops
    name = record.label if named else record.op
    if not (comms_logger.prof_all or name in comms_logger.prof_ops or record.op in comms_logger.prof_ops):
        return
    size = record.nbytes // record.group_size if record.op == "all_gather" else record.nbytes  # of a rank's input
    comms_logger.append(record.op, name, max(record.ms, 1e-6), size)


def timed_op(func: Callable[..., R]) -> Callable[..., R]:
    """Return `func`, a function of tensors that communicates, with its calls recorded while recording is on.

    They are recorded under their `log_name`, if `prof=True`, all operations or this name are.  `func` must be
    named like an operation of `calc_bw_log`.
    """
    default_name = str(get_default_args(func).get("log_name", func.__name__))
    signature = inspect.signature(func)

    @functools.wraps(func)
    def timed(*args: Any, **kwargs: Any) -> R:
        if not comms_logger.enabled:
            return func(*args, **kwargs)
        own = {name: value for name, value in kwargs.items() if name in signature.parameters}
        given = {**signature.bind_partial(*args, **own).arguments, **kwargs}
        name = str(given.get("log_name", default_name))
        if not (given.get("prof", False) or comms_logger.prof_all or name in comms_logger.prof_ops):
            return func(*args, **kwargs)
        began = time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            get_accelerator().synchronize()
            ms = 1e3 * (time.perf_counter() - began)
            title = get_debug_log_name({"log_name": name}, comms_logger.debug)
            comms_logger.append(func.__name__, title, ms, get_msg_size_from_args(func, *args, **kwargs))

    return timed


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print the collectives recorded so far, on rank 0.  Every rank must call.

    show_straggler: compare the latencies of all ranks.
    return_dict: return "summary" (operation -> bytes of a message -> count, latencies in ms, Gbit/s),
    "straggler_analysis" and "metadata"; otherwise None.
    """
    zcomm.barrier()
    chosen = comms_logger
    if not (chosen.enabled or chosen.has_data()):
        chosen = _of_engines()
    return chosen.log_all(get_rank() == 0, show_straggler, return_dict)


def _of_engines() -> CommsLogger:
    """Return records of what engines with `comms_logger` have counted: each with the mean latency of its kind."""
    found = CommsLogger()
    for each in open_messages() or ():
        size = each.size_bytes // each.group_size if each.op == "all_gather" else each.size_bytes
        for _ in range(each.tally.count):
            found.append(each.op, each.op, max(each.tally.ms / each.tally.count, 1e-6), size)
    return found


def reset_log() -> None:
    """Forget the records."""
    comms_logger.reset_data()


def has_comm_data() -> bool:
    """Return True if there are records."""
    return comms_logger.has_data()


def get_comm_operation_count() -> int:
    """Return the number of recorded collectives."""
    return comms_logger.get_total_operations()


def get_logged_comm_ops() -> list[str]:
    """Return the names of the recorded operations."""
    return comms_logger.get_operation_names()
