"""The environment of a measurement: processor, versions, load of other processes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import attrs
import torch
from floors import FLAGS, compiler

import zoptim

__all__ = ["Watch", "facts", "import_cost", "load", "wait_until_idle"]

PACKAGES = ("torch", "zoptim", "numpy", "deepspeed", "cupy-cuda12x", "cupy-cuda13x")
IMPORT_LIMIT_MS = 30


def facts(device: torch.device) -> dict[str, Any]:
    """Machine and versions, ready for JSON."""
    kernels = zoptim.kernels()
    used = kernels.gpu if device.type == "cuda" else f"{kernels.cpu}, {kernels.threads}"
    found = {
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "kernels": used,
        "floor": f"{_first_line([compiler() or 'no compiler', '--version'])}, {' '.join(FLAGS)}",
    }
    if device.type == "cuda":
        found |= {
            "gpu": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "floor": "copies of 1 GiB on the device",
        }
    return found


@attrs.frozen
class Watch:
    """Processor time since construction, of this process and of all processes."""

    wall: float = attrs.field(factory=time.monotonic)
    own: float = attrs.field(factory=lambda: sum(os.times()[:4]))
    total: float | None = attrs.field(factory=lambda: _busy_seconds())

    def others(self) -> float | None:
        """Cores that other processes kept busy, on average; None if the system does not report it."""
        now = Watch()
        if self.total is None or now.total is None:
            return None
        busy = now.total - self.total - (now.own - self.own)
        return max(0.0, busy / max(now.wall - self.wall, 1e-3))


def wait_until_idle(seconds: float, most_cores: float) -> None:
    """Sleep until other processes use at most `cores` for two seconds, but not longer than `seconds`."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        watch = Watch()
        time.sleep(2)
        if (watch.others() or 0.0) <= most_cores:
            return


def load() -> float:
    """The load average of the last minute; the benchmark contributes up to its number of threads."""
    return os.getloadavg()[0]


def _busy_seconds() -> float | None:
    """Seconds in which a core was busy, or stolen by the hypervisor."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, words[:8])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def import_cost(runs: int = 5) -> dict[str, Any]:
    """The cost of `import zoptim` beyond `import torch`: the median of new interpreters, in ms."""
    added = []
    whole = []
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for number in range(runs + 1):
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", "import torch, zoptim"],
            capture_output=True, text=True, check=True, env=environ,
        )  # fmt: skip
        if number == 0:
            continue  # the first run may compile modules
        cumulative = _cumulative_us(done.stderr)
        whole.append(cumulative["torch"] / 1e3)
        added.append(cumulative["zoptim"] / 1e3)
    return {
        "torch_ms": round(statistics.median(whole), 1),
        "zoptim_ms": round(statistics.median(added), 1),
        "zoptim_least_ms": round(min(added), 1),
        "limit_ms": IMPORT_LIMIT_MS,
        "runs": runs,
    }


def _cumulative_us(report: str) -> dict[str, int]:
    """Module -> cumulative time, from the output of -X importtime: 'import time: self | cumulative | name'."""
    found = {}
    for line in report.splitlines():
        if line.startswith("import time:") and line.count("|") == 2:
            _, cumulative, name = line.split(":", 1)[1].split("|")
            if cumulative.strip().isdigit():
                found[name.strip()] = int(cumulative)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()[0]
    except (OSError, IndexError):
        return command[0]
