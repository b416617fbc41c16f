"""The simulated device as Python sees it: loading, schedules, violations, counts."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping
from typing import Any

from simulated_cuda.build import build, torch_folder

__all__ = ["host_access", "host_waits", "library", "load", "set_schedule", "stats", "take_violations"]

STATS = (
    "allocated",
    "peak_allocated",
    "reserved",
    "peak_reserved",
    "pinned",
    "num_allocations",
    "num_host_waits",
    "num_reused",
)
# Loaded for all to see before the device, which takes its symbols from them.
TORCH_LIBRARIES = ("libgomp.so.1", "libc10.so", "libtorch_cpu.so")
_TYPES: dict[str, tuple[Any, list[Any]]] = {
    "sim_current_stream": (ctypes.c_int64, []),
    "sim_set_stream": (None, [ctypes.c_int64]),
    "sim_schedule": (None, [ctypes.c_char_p]),
    "sim_checks": (None, [ctypes.c_bool]),
    "sim_is_capturing": (ctypes.c_bool, []),
    "sim_new_graph": (ctypes.c_void_p, []),
    "sim_begin_capture": (None, [ctypes.c_void_p]),
    "sim_delete_graph": (None, [ctypes.c_void_p]),
    "sim_replay": (None, [ctypes.c_void_p]),
    "sim_stats": (None, [ctypes.POINTER(ctypes.c_int64)]),
    "sim_take_violations": (ctypes.c_char_p, []),
    "sim_waits": (ctypes.c_char_p, []),
    "sim_host_access": (None, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_bool, ctypes.c_char_p]),
    "sim_launch_kernel": (
        ctypes.c_bool,
        [ctypes.c_char_p, *[ctypes.c_void_p] * 2, ctypes.c_int64, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int64],
    ),
    "sim_last_error": (ctypes.c_char_p, []),
    "sim_record_stream": (None, [ctypes.c_void_p, ctypes.c_int64]),
    "sim_is_device": (ctypes.c_bool, [ctypes.c_void_p]),
}


def load() -> None:
    """Load the device.  Must come before `import torch`, which asks for devices once."""
    folder = torch_folder() / "lib"
    for name in TORCH_LIBRARIES:
        if (folder / name).exists():
            ctypes.CDLL(str(folder / name), ctypes.RTLD_GLOBAL)
    library()


@functools.cache
def library() -> ctypes.CDLL:
    """Return the device's library."""
    loaded = ctypes.CDLL(str(build()["device"]), ctypes.RTLD_GLOBAL)
    for name, (result, arguments) in _TYPES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def set_schedule(name: str) -> None:
    """Run work "early", "late", or "random:SEED"; what was launched before runs now."""
    if name not in ("early", "late") and not name.removeprefix("random:").isdigit():
        raise ValueError(f"schedule {name!r} is unknown; allowed: early, late, random:SEED (a whole number)")
    library().sim_schedule(name.encode())


def take_violations() -> list[str]:
    """Return the accesses that nothing orders, in the order in which they were found, and forget them."""
    text: bytes = library().sim_take_violations()
    return text.decode().splitlines()


def host_waits() -> Mapping[str, int]:
    """Return how often the host has waited for the device, by what made it wait."""
    text: bytes = library().sim_waits()
    pairs = (line.rpartition("=") for line in text.decode().splitlines())
    return {what: int(count) for what, _, count in pairs}


def host_access(address: int, num_bytes: int, writes: bool, what: str) -> None:
    """Check an access of the host that no operator shows, such as a C kernel's."""
    library().sim_host_access(address, num_bytes, writes, what.encode())


def stats() -> Mapping[str, int]:
    """Return the counts of memory (bytes), allocations and waits."""
    values = (ctypes.c_int64 * len(STATS))()
    library().sim_stats(values)
    return dict(zip(STATS, values))
