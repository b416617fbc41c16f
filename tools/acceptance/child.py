"""One process for one piece, or for the facts of the device: the result goes into a file."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import repo

from acceptance.plants import planted
from acceptance.table import Piece
from acceptance.verdict import State, Verdict

__all__ = ["PARENT_VARIABLE", "device_facts", "end_with_parent", "run_piece"]

PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "GPU_ACCEPTANCE_PARENT"  # number of the process that runs the pieces
OURS = {*repo.PACKAGES, "acceptance", "simulated_cuda", "contract_table"}


def end_with_parent() -> None:
    """Have the kernel end this process when its parent ends, however that happens."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT_VARIABLE) not in (None, str(os.getppid())):
        sys.exit("the process that started this one has ended")


def device_facts() -> dict[str, Any]:
    """Return device and versions.  Raises RuntimeError without a CUDA device."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} sees no CUDA device. Install a CUDA build of torch on a machine with an "
            "NVIDIA GPU, or pass --device simulated."
        )
    properties: Any = torch.cuda.get_device_properties(0)
    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for name in ("cupy", "numpy", "attrs"):
        with contextlib.suppress(ImportError):
            versions[name] = str(importlib.import_module(name).__version__)
    with contextlib.suppress(Exception):
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "is_simulated": "simulated_cuda.library" in sys.modules,
        "driver": _driver(),
        "versions": versions,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "none"
    return (done.stdout.splitlines() or ["unknown"])[0].strip()


def run_piece(piece: Piece, results: Path, plant: str = "") -> Verdict:
    """Run a piece in this process.  An exception is a failed verdict."""
    start = time.monotonic()
    try:
        verdict = _run(piece, results, plant, start)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            return _failed(piece, start)
        reason = f"Python has no module {error.name!r}, which it needs"
        verdict = Verdict(piece=piece.name, state=State.NOT_RUN, reason=reason)
    except Exception:
        verdict = _failed(piece, start)
    return verdict


def _failed(piece: Piece, start: float) -> Verdict:
    text = traceback.format_exc()
    seconds = round(time.monotonic() - start, 1)
    reason = text.strip().splitlines()[-1]
    return Verdict(piece=piece.name, state=State.FAILED, reason=reason, seconds=seconds, output=text[-4000:])


def _run(piece: Piece, results: Path, plant: str, start: float) -> Verdict:
    import torch

    from acceptance.bench import Bench, NotRunHere

    is_simulated = "simulated_cuda.library" in sys.modules
    take_violations: Callable[[], list[str]] = list
    if is_simulated:
        from simulated_cuda import library

        library.set_schedule(os.environ["SIMULATED_CUDA_SCHEDULE"])
        take_violations = library.take_violations
    module, _, function = piece.function.partition(":")
    with tempfile.TemporaryDirectory(prefix="gpu-acceptance-") as folder:
        bench = Bench(torch.device("cuda", 0), Path(folder), results, is_simulated)
        run = getattr(importlib.import_module(f"acceptance.pieces.{module}"), function)
        try:
            with planted(plant):
                run(bench)
            torch.cuda.synchronize()
        except NotRunHere as reason:
            bench.skip(piece.title, str(reason))
        finally:
            gc.collect()
        found = take_violations()
        if found or (is_simulated and bench.checks):
            bench.check("every access is ordered", found)
        return bench.verdict(piece.name, time.monotonic() - start)


def write(path: str, result: dict[str, Any]) -> None:
    """Write a result at once, or not at all."""
    made = Path(f"{path}.{os.getpid()}")
    made.write_text(json.dumps(result))
    made.replace(path)


def main(name: str, target: str, results: str, plant: str) -> int:
    """Run piece `name`, or collect the facts, and write the result as JSON to `target`."""
    end_with_parent()
    faulthandler.enable()
    if name == "facts":
        write(target, device_facts())
        return 0
    from acceptance.table import choose

    (piece,) = choose(name)
    write(target, run_piece(piece, Path(results), plant).to_json())
    return 0
