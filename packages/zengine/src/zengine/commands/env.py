"""`zengine env`: describe this machine, for bug reports and before a run.

Prints versions, processor and kernels, memory and its limits, GPUs, optional packages, environment variables that
affect a run, and known problems.  `--try` starts two ranks to find the transport between them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

import zcomm
import zoptim
from zengine.planning.tables import columns, gib, section

Rows = list[tuple[str, str]]
_OURS = ("zengine-torch", "zcomm-torch", "zprecision", "zpartition", "zoptim", "zckpt")
_OPTIONAL = {
    "cupy": "fused optimizer kernels on GPUs",
    "wandb": "the wandb monitor",
    "comet-ml": "the comet monitor",
    "mlflow": "the mlflow monitor",
    "aim": "the aim monitor",
    "trackio": "the trackio monitor",
    "fsspec": "checkpoints in object stores",
    "transformers": "the Trainer",
    "accelerate": "the Accelerator",
    "rich": "a live line on terminals",
}
_VARIABLES = ("OMP_", "MKL_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "ZCOMM_", "ZOPTIM_", "SLURM_JOB_ID")
_FEW_FILES = 1024


def run(arguments: argparse.Namespace) -> int:
    """Print all sections."""
    found = dict(sections(arguments.tries))
    if arguments.json:
        print(json.dumps({title: dict(rows) for title, rows in found.items()}, indent=1))
    else:
        print("\n\n".join(section(title, columns(rows)) for title, rows in found.items()))
    return 0


def sections(tries: bool) -> Iterator[tuple[str, Rows]]:
    """Yield (title, rows of name and value)."""
    yield "versions", _versions()
    yield "processor", _processor()
    yield "memory", _memory()
    yield "GPUs", _gpus()
    yield "transport between ranks", _transport(tries)
    yield "optional packages", [(name, _version(name) or f"absent: {use}") for name, use in _OPTIONAL.items()]
    variables = [(name, value) for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)]
    yield "variables", variables or [("(none)", "that affects a run")]
    yield "known problems", list(problems()) or [("(none)", "")]


def problems() -> Iterator[tuple[str, str]]:
    """Yield (subject, advice) of known problems on this machine."""
    kernels = zoptim.kernels()
    if not kernels.levels:
        yield "optimizer kernels", f"torch operations are used instead: {kernels.cpu}"
    if torch.cuda.is_available() and _version("cupy") is None and not kernels.gpu.startswith("CuPy"):
        yield (
            "optimizer kernels on the GPU",
            "pip install cupy-cuda12x: an optimizer step becomes one launch",
        )
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft <= _FEW_FILES:
        yield "open files", f"{soft} may be too few for many ranks and loader workers: ulimit -n 65536"
    limit, total = _limit_bytes(), _total_bytes()
    if limit and limit < total:
        yield "memory limit", f"this container is killed beyond {gib(limit)} of {gib(total)}"
    if not torch.cuda.is_available() and not _has_bf16():
        yield (
            "bf16",
            'this processor has no bf16 instructions: float32 trains faster ("bf16": {"enabled": "auto"} measures)',
        )


def _versions() -> Rows:
    ours = [(name, _version(name) or "from the source tree") for name in _OURS]
    built = torch.version.cuda or "without CUDA"
    return [("python", platform.python_version()), ("torch", f"{torch.__version__} (CUDA: {built})"), *ours]


def _processor() -> Rows:
    usable = len(os.sched_getaffinity(0))
    return [
        ("model", _cpu_model()),
        ("cores", f"{usable} of {os.cpu_count()} usable, torch uses {torch.get_num_threads()} threads"),
        ("bf16 instructions", "yes" if _has_bf16() else "no"),
        *((f"optimizer kernels, {line[:10].strip()}", line[10:]) for line in str(zoptim.kernels()).splitlines()),
    ]


def _memory() -> Rows:
    limit = _limit_bytes()
    return [
        ("total", gib(_total_bytes())),
        ("available", gib(_meminfo("MemAvailable"))),
        ("limit of this container", gib(limit) if limit else "none"),
        ("/dev/shm", "not used: ranks share anonymous memory"),
    ]


def _gpus() -> Rows:
    if not torch.cuda.is_available():
        return [("(none)", "training runs on the CPU")]
    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(
            (f"cuda:{index}", f"{about.name}, {gib(about.total_memory)}, capability {about.major}.{about.minor}")
        )
    return found


def _transport(tries: bool) -> Rows:
    rows = [("NCCL", "yes" if torch.distributed.is_nccl_available() else "no"), ("Gloo", "yes")]
    if not tries:
        return [*rows, ("shared memory", "pass --try to start two ranks and test it")]
    from zcomm.testing import run_ranks

    carrier, reason = run_ranks(_exchange, 2)[0]
    return [*rows, ("two ranks here", f"{carrier} ({reason})")]


def _exchange() -> tuple[str, str]:
    zcomm.all_reduce(torch.ones(1024))
    return zcomm.transport(), zcomm.transport_reason()


def _version(name: str) -> str | None:
    names = [name, *(f"{name}-cuda{major}x" for major in (11, 12, 13) if name == "cupy")]
    for each in names:
        try:
            return metadata.version(each)
        except metadata.PackageNotFoundError:
            continue
    return None


def _cpu_model() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _has_bf16() -> bool:
    flags = next((line for line in _lines("/proc/cpuinfo") if line.startswith(("flags", "Features"))), "")
    return any(flag in flags.split() for flag in ("avx512_bf16", "amx_bf16", "bf16"))


def _total_bytes() -> int:
    return _meminfo("MemTotal")


def _meminfo(name: str) -> int:
    line = next((line for line in _lines("/proc/meminfo") if line.startswith(f"{name}:")), "")
    return int(line.split()[1]) * 1024 if line else 0


def _limit_bytes() -> int:
    """Return the memory limit of the control group in bytes; 0: none."""
    for place in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        text = "".join(_lines(place)).strip()
        if text.isdigit() and int(text) < 1 << 60:
            return int(text)
    return 0


def _lines(place: str) -> list[str]:
    try:
        return Path(place).read_text().splitlines()
    except OSError:
        return []
