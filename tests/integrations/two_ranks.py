"""Start a script on two CPU ranks with zengine as its `deepspeed`; write and read what each rank has found.

All runs of a script share one process on each rank, because importing their libraries takes longer than they do.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def start(script: Path, rank: int, port: int, folder: Path) -> subprocess.Popen[str]:
    """Start a rank as torchrun does, without its start-up time."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "OMP_NUM_THREADS": 1}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in {**place, **meeting}.items()}}
    command = [sys.executable, "-m", "zengine.as_deepspeed", str(script), str(folder)]
    with open(folder / f"rank{rank}.log", "w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)


def run(script: Path, folder: Path, limit_s: int = 600) -> list[dict[str, Any]]:
    """Run `script FOLDER` on two ranks; return the content of FOLDER/rank<N>.json of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [start(script, rank, port, folder) for rank in (0, 1)]
    try:
        codes = [rank.wait(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    logs = "\n".join((folder / f"rank{rank}.log").read_text()[-3000:] for rank in (0, 1))
    assert codes == [0, 0], logs
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def report(checks: Mapping[str, Callable[[], Any]], path: Path, wanted: list[str]) -> None:
    """Run checks on a rank and write their results or errors as JSON; `wanted` are parts of names, or empty."""
    import deepspeed  # the one that the rank was started with

    found: dict[str, Any] = {"deepspeed": deepspeed.__name__}
    gc.collect()
    gc.freeze()  # the libraries' objects, which Accelerate's collection before each training would visit
    for name, check in checks.items():
        if any(part in name for part in wanted or [""]):
            try:
                found[name] = check()
            except Exception:
                found[name] = {"error": traceback.format_exc()}
                traceback.print_exc()  # into the log: the other rank may hang now
            gc.collect()
    path.write_text(json.dumps(found))


def of(found: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return one check's result on rank 0; fail if it raised on either rank."""
    for rank, results in enumerate(found):
        assert "error" not in results[name], f"rank {rank}: {results[name]['error']}"
    return found[0][name]
