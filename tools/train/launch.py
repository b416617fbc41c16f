"""Launcher of the main job: starts it on several ranks, for `python3 tools/dev.py train [options]`.

torchrun runs in this process, with three additions:

- One computing thread per core: OMP_NUM_THREADS is the number of cores divided by the ranks.  Otherwise every rank
  would start a thread per core, and two ranks on two cores would run at half speed.
- Ctrl-C saves.  Every rank inherits the read end of a pipe as its standard input.  Ctrl-C and SIGTERM close the write
  end; the ranks see the end of the file, save a checkpoint at the next step boundary and exit.  A second Ctrl-C ends
  them at once.  The pipe also closes if this process is killed, so no rank outlives it.  (torchrun itself would
  forward the signal and print its stack.)
- The end is one line and an exit code instead of torchrun's stack.

Exit code: 0; 2 for an error in options or config; 3 if a full-length run did not beat the byte tables; 128 + signal
after an interruption; else that of the rank that failed.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

TOOLS = Path(__file__).resolve().parents[1]
RUNS = TOOLS.parent / "runs"  # folder of runs, without --runs
SPLITS = {  # options that split one model over ranks: name -> path of the key in the config, help text
    "tensor": (("tensor_parallel", "autotp_size"), "ranks that split the layers of one model"),
    "sequence": (("sequence_parallel_size",), "ranks that split each window"),
    "expert": (("expert_parallel", "autoep_size"), "ranks that shard the experts of a mixture of experts"),
    "pipeline": (("pipeline", "stages"), "pipeline stages: ranks that hold consecutive layers"),
}
CONTROL = "TRAIN_CONTROL"  # environment variable: set when standard input is the pipe described above
USAGE_ERROR, BELOW_BASELINE = 2, 3  # exit codes


def parser() -> argparse.ArgumentParser:
    """Return the parser of the main job's options, for the launcher and for every rank."""
    made = argparse.ArgumentParser(
        prog="dev.py train",
        description="Train a small GPT on the Python standard library: about six minutes on two cores.",
        epilog="Ctrl-C saves a checkpoint; train --resume continues bit for bit.",
    )
    add = made.add_argument
    add(
        "--ranks",
        type=positive,
        metavar="N",
        help="processes that train together (2; with a single GPU 1)",
    )
    add("--threads", type=positive, metavar="N", help="computing threads of each rank (default: cores / ranks)")
    add(
        "--steps",
        type=positive,
        metavar="N",
        help="optimizer steps (default: that of the config); more with --resume extend a run",
    )
    add("--minutes", type=float, default=float("inf"), metavar="M", help="stop after M minutes and report")
    add("--name", type=run_name, metavar="NAME", help="folder of the run below runs/ (default: date and time)")
    add("--resume", action="store_true", help="continue the run --name, or the newest, from its last checkpoint")
    add("--seed", type=int, metavar="N", help="of the weights and the order of the text (default 0)")
    add("--config", type=Path, metavar="FILE", help="in DeepSpeed's format (default: tools/train/config.json)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: that of the config)")
    add("--micro-batch", type=positive, metavar="N", help="windows of one rank's forward (default: the config's)")
    for name, (_key, what) in SPLITS.items():
        add(f"--{name}", type=positive, metavar="N", help=f"{what}; may change with --resume")
    add("--quick", action="store_true", help="a tiny model for a few seconds, as a smoke test")
    add("--runs", type=Path, default=RUNS, metavar="FOLDER", help="where runs are kept (runs/)")
    add("--die-at", type=int, default=0, metavar="STEP", help="SIGKILL after this step, to test --resume")
    return made


def positive(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_name(text: str) -> str:
    """Parse a plain folder name."""
    if not text or text != Path(text).name or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plain folder name")
    return text


def choose_name(options: argparse.Namespace) -> str:
    """Return the name of the run to start or to resume.

    Raises ValueError if there is nothing to resume, or if a new run would overwrite another.
    """
    runs: Path = options.runs
    if not options.resume:
        name = options.name or time.strftime("%Y-%m-%d_%H%M%S")
        if (runs / name / "run.json").exists():
            raise ValueError(f"{runs} has a run {name!r} already: resume it with --resume, or choose another --name")
        return str(name)
    saved = sorted(runs.glob("*/checkpoints/latest"), key=lambda path: path.stat().st_mtime)
    names = [path.parents[1].name for path in saved]
    if not names:
        raise ValueError(f"nothing to resume: no run in {runs} has a checkpoint yet")
    if options.name and options.name not in names:
        raise ValueError(f"no run {options.name!r} in {runs} has a checkpoint; there are {', '.join(names)}")
    return str(options.name or names[-1])


def ranks_per_replica(options: argparse.Namespace) -> int:
    """Return the ranks that the options give one model replica; expert ranks have windows of their own."""
    return math.prod(getattr(options, name) or 1 for name in SPLITS if name != "expert")


def num_ranks(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Return the number of ranks to start: --ranks, else enough for the splits of the options or the config."""
    degrees = argparse.Namespace(**{name: getattr(options, name) or degree_of(config, name) for name in SPLITS})
    found: int = options.ranks or max(default_ranks(), ranks_per_replica(degrees) * degrees.expert)
    return found


def degree_of(config: Mapping[str, Any], name: str) -> int:
    """Return the degree of one split (a key of SPLITS) in a config; 1 if it is absent."""
    section: Any = config
    for key in SPLITS[name][0]:
        section = section.get(key, {})
    found: int = section or 1
    return found


def saved_config(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the config of the run to resume, the default for its splits; {} for a new run."""
    if not options.resume:
        return {}
    found: dict[str, Any] = json.loads((options.runs / name / "run.json").read_text())["config"]
    return found


def available_cores() -> int:
    """Return the number of cores that this process may use; a container may limit it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_ranks() -> int:
    """Return 2, or 1 on a machine with a single GPU, which NCCL does not share between ranks."""
    import torch

    return 1 if torch.cuda.device_count() == 1 else 2


class ControlPipe:
    """Write end of the ranks' standard input; SIGINT and SIGTERM close it."""

    def __init__(self) -> None:
        self.signal = 0  # first signal received; 0 if none
        read_end, self._write_end = os.pipe()  # not inheritable: only this process holds the write end
        os.dup2(read_end, 0)
        os.close(read_end)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            from torch.distributed.elastic.multiprocessing import SignalException

            raise SignalException("second signal", signal.SIGKILL)  # the signal that torchrun sends the ranks
        self.signal = number
        os.close(self._write_end)
        print("\nstopping after this step (Ctrl-C again to stop at once)", file=sys.stderr, flush=True)


def torchrun(ranks: int, arguments: list[str]) -> int:
    """Run main.py on `ranks` ranks; return the exit code of the first rank that failed, or 0."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's summary of each rank's end
    ours = "SIGHUP,SIGQUIT"  # signals for torchrun; the control pipe handles SIGINT and SIGTERM
    # --local-addr: the ranks are all here, and a container's host name may not resolve.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", f"--signals-to-handle={ours}"]
    try:
        run.run(run.parse_args([*options, "-m", "train.main", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"train: rank {rank} was killed by {signal.Signals(-code).name}", file=sys.stderr)
        return 128 - code if code < 0 else code  # the rank itself has explained a positive code
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        name = choose_name(options)
    except ValueError as error:
        print(f"train: {error}", file=sys.stderr)
        return USAGE_ERROR
    pipe = ControlPipe()
    ranks = num_ranks(options, saved_config(options, name))
    threads = options.threads or max(1, available_cores() // ranks)
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    os.environ.update({"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, CONTROL: "1"})
    code = torchrun(ranks, [*arguments, "--name", name])
    if code not in (0, USAGE_ERROR, BELOW_BASELINE) and (options.runs / name / "checkpoints" / "latest").exists():
        print(f"train: to continue: python3 tools/dev.py train --resume --name {name}", file=sys.stderr)
    return 128 + pipe.signal if pipe.signal else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
