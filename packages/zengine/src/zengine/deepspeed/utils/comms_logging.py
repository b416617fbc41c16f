"""`deepspeed.utils.comms_logging`: latency and bandwidth of collectives by operation and message size."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeAlias, final

import zcomm
from zengine.deepspeed.comm.world import get_rank, get_world_size
from zengine.deepspeed.utils.logging import log_dist
from zengine.deepspeed.utils.timer import trim_mean

__all__ = ["CommsLogger", "calc_bw_log", "convert_size", "get_caller_func", "print_rank_0"]

# operation -> message size in bytes -> [count, latencies in ms, algorithm bandwidths, bus bandwidths in Gbit/s]
CommsDict: TypeAlias = dict[str, dict[int, list[Any]]]

_WHOLE = frozenset({"all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"})
_REDUCED = frozenset({"all_reduce", "all_reduce_coalesced", "inference_all_reduce"})
_TRADED = frozenset({"all_to_all", "all_to_all_single"})
_PLAIN = frozenset(
    {
        *("send", "recv", "isend", "irecv", "batch_isend_irecv", "broadcast", "broadcast_object_list"),
        *("reduce", "gather", "scatter", "barrier"),
    }
)
_UNITS = ("B", "KB", "MB", "GB", "TB", "PB", "EB", "ZB", "YB")
_HEADS = {
    "summary": ("Total Latency(ms)", "Avg Latency(ms)", "tput_avg (Gbps)", "busbw_avg (Gbps)"),
    "straggler": ("Total comm lat(ms)", "Total straggler(ms)", "Avg comm lat(ms)", "Avg straggler(ms)"),
}


def get_caller_func(frame: int = 3) -> str:
    """Return the name of the function `frame` calls above this one."""
    return sys._getframe(frame).f_code.co_name


def print_rank_0(message: str) -> None:
    """Print on rank 0."""
    if get_rank() == 0:
        print(message)


def convert_size(size_bytes: int) -> str:
    """Format a size with two decimals in binary units: 1536 gives "1.5 KB"."""
    if size_bytes == 0:
        return "0B"
    power = math.floor(math.log(size_bytes, 1024))
    return f"{round(size_bytes / math.pow(1024, power), 2)} {_UNITS[power]}"


def calc_bw_log(comm_op: str, size: float, duration: float) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in Gbit/s of `size` bytes in `duration` ms, over all ranks.

    Raises ValueError for an unknown operation.
    """
    ranks = get_world_size()
    share = (ranks - 1) / ranks
    if comm_op in _TRADED or comm_op in _WHOLE:
        throughput = size * (ranks if comm_op in _WHOLE else 1) / duration
        bus = throughput * share
    elif comm_op in _REDUCED:
        throughput, bus = size * 2 / duration, size / duration * 2 * share
    elif comm_op in _PLAIN:
        throughput = bus = size / duration
    else:
        known = sorted(_WHOLE | _REDUCED | _TRADED | _PLAIN)
        raise ValueError(f"calc_bw_log({comm_op!r}): not a communication; choose one of {', '.join(known)}.")
    return throughput * 8 / 1e6, bus * 8 / 1e6


@final
class CommsLogger:
    """Records of collectives.  `deepspeed.comm.configure` fills the process's own."""

    def __init__(self) -> None:
        self.comms_dict: CommsDict = {}
        self.enabled = False
        self.verbose = False  # log each one
        self.debug = False
        self.prof_all = True  # False: only those in `prof_ops`
        self.prof_ops: list[str] = []

    def configure(self, comms_config: Any) -> None:
        """Take the settings of a DeepSpeedCommsConfig."""
        self.enabled = comms_config.comms_logger_enabled
        if self.enabled:
            section = comms_config.comms_logger
            self.verbose, self.debug = section.verbose, section.debug
            self.prof_ops, self.prof_all = list(section.prof_ops), section.prof_all

    def start_profiling_comms(self) -> None:
        self.prof_all = True

    def stop_profiling_comms(self) -> None:
        self.prof_all = False

    def start_profiling_op(self, op_name_list: Iterable[str]) -> None:
        self.prof_ops = list({*self.prof_ops, *op_name_list})

    def stop_profiling_op(self, op_name_list: Iterable[str]) -> None:
        stopped = set(op_name_list)
        self.prof_ops = [name for name in self.prof_ops if name not in stopped]

    def append(self, raw_name: str, record_name: str, latency: float, msg_size: int) -> None:
        """Add one of `msg_size` bytes that took `latency` ms.

        raw_name: the operation, which decides the bandwidth.  record_name: the name in the tables.
        """
        algorithm, bus = calc_bw_log(raw_name, msg_size, latency)
        entry = self.comms_dict.setdefault(record_name, {}).setdefault(msg_size, [0, [], [], []])
        entry[0] += 1
        for values, value in zip(entry[1:], (latency, algorithm, bus)):
            values.append(value)
        if self.verbose:
            rates = f"algbw (Gbps): {algorithm:.2f} | busbw (Gbps): {bus:.2f}"
            log_dist(
                f"comm op: {record_name} | time (ms): {latency:.2f} | msg size: {convert_size(msg_size)} | {rates}",
                [0],
            )

    def get_raw_data(self) -> CommsDict:
        """Return operation -> bytes -> [count, latencies, algorithm bandwidths, bus bandwidths]."""
        return self.comms_dict.copy()

    def has_data(self) -> bool:
        return bool(self.comms_dict)

    def reset_data(self) -> None:
        self.comms_dict.clear()

    def get_operation_names(self) -> list[str]:
        return list(self.comms_dict)

    def get_total_operations(self) -> int:
        return sum(entry[0] for sizes in self.comms_dict.values() for entry in sizes.values())

    def get_operation_summary(self, operation_name: str) -> dict[int, dict[str, Any]] | None:
        """Return the figures of an operation by message size; None if it was not recorded."""
        sizes = self.comms_dict.get(operation_name)
        return None if sizes is None else {size: _figures(size, entry) for size, entry in sorted(sizes.items())}

    def log_all(
        self, print_log: bool = True, show_straggler: bool = False, return_dict: bool = False
    ) -> dict[str, Any] | None:
        """Print the records, and return them with `return_dict`: "summary", "straggler_analysis", "metadata".

        show_straggler: compare with all ranks, which must call.  The least latency of any rank is taken for the
        communication, the rest of a rank's own for its wait for others.
        """
        summary = {name: self.get_operation_summary(name) or {} for name in self.comms_dict}
        analysis = self._compare() if show_straggler else None
        if print_log:
            _print("summary", summary)
            if analysis is not None:
                print("Breakdown with straggler effect")
                _print("straggler", analysis)
        place = {"world_size": get_world_size(), "rank": get_rank(), "timestamp": datetime.now().isoformat()}
        return {"summary": summary, "straggler_analysis": analysis, "metadata": place} if return_dict else None

    def _compare(self) -> dict[str, dict[int, dict[str, Any]]]:
        """Return the waits of this rank for others, of the messages that every rank has recorded."""
        mine = [[name, size, entry[1]] for name, sizes in self.comms_dict.items() for size, entry in sizes.items()]
        tables = [{(name, size): times for name, size, times in rank} for rank in zcomm.all_gather_object(mine)]
        found: dict[str, dict[int, dict[str, Any]]] = {}
        for name, size, own in mine:
            if not all((name, size) in table for table in tables):
                continue
            least = [min(times) for times in zip(*(table[name, size] for table in tables))]
            waits = [time - lowest for time, lowest in zip(own, least)]
            found.setdefault(name, {})[size] = {
                "count": len(own),
                "total_comm_lat_ms": sum(least),
                "total_straggler_ms": sum(waits),
                "avg_comm_lat_ms": trim_mean(least, 0.1),
                "avg_straggler_ms": trim_mean(waits, 0.1),
                "msg_size_bytes": size,
                "msg_size_str": convert_size(size),
            }
        return found


def _figures(size: int, entry: list[Any]) -> dict[str, Any]:
    """Return the figures of one message size; means leave out the lowest and highest tenth."""
    return {
        "count": entry[0],
        "total_latency_ms": sum(entry[1]),
        "avg_latency_ms": trim_mean(entry[1], 0.1),
        "tput_avg_gbps": trim_mean(entry[2], 0.1),
        "busbw_avg_gbps": trim_mean(entry[3], 0.1),
        "msg_size_bytes": size,
        "msg_size_str": convert_size(size),
    }


def _print(kind: str, table: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> None:
    print("".join(f"{head: <20}" for head in ("Comm. Op", "Message Size", "Count", *_HEADS[kind])))
    for name, sizes in table.items():
        print(name)
        for size, figures in sorted(sizes.items()):
            values = list(figures.values())
            cells = "".join(f"{value: <20.2f}" for value in values[1:5])
            print(f"{' ': <20}{convert_size(size): <20}{values[0]: <20}{cells}")
