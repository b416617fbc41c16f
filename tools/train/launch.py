"""Starts the main job on several ranks: `python3 tools/dev.py train [options]` ends up here.

torchrun does the launching, in this process.  Three things are added to it:

- One core is one computing thread: OMP_NUM_THREADS is the cores divided by the ranks.  Without it every rank
  would start a thread per core, and two ranks on two cores would run at half speed.
- Ctrl-C is a request, not a kill.  Every rank inherits the reading end of a pipe as its standard input; Ctrl-C
  and SIGTERM close the writing end, the ranks see its end, save a checkpoint at the next step boundary and leave.
  A second Ctrl-C ends them at once.  If this process is killed outright the pipe closes as well, so no rank is
  ever left running.  (torchrun's own answer to a signal is to pass it on and then print its stack.)
- The end is one line and an exit code, not torchrun's stack.

Exit code: 0; 2 for a mistake in options or config; 3 when a full-length run did not beat the byte tables;
128 + signal after an interruption; else that of the rank that failed.
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
SPLITS = {  # options that split one model over ranks: name -> path of the key in the config, what it is
    "tensor": (("tensor_parallel", "autotp_size"), "ranks that share the layers of one model"),
    "sequence": (("sequence_parallel_size",), "ranks that share the bytes of each window"),
    "expert": (("expert_parallel", "autoep_size"), "ranks that share the experts of a model that has some"),
    "pipeline": (("pipeline", "stages"), "ranks that have some of the layers each, one after the other"),
}
CONTROL = "TRAIN_CONTROL"  # environment variable: set when standard input is the pipe described above
MISTAKE, DEFEAT = 2, 3  # exit codes


def parser() -> argparse.ArgumentParser:
    """The options of the main job, read here and by every rank."""
    made = argparse.ArgumentParser(
        prog="dev.py train",
        description="Train a small GPT on the Python standard library: about six minutes on two cores.",
        epilog="Ctrl-C saves a checkpoint; train --resume continues as if nothing had happened.",
    )
    add = made.add_argument
    add(
        "--ranks",
        type=positive,
        metavar="N",
        help="processes that train together (2; with a single GPU 1)",
    )
    add("--threads", type=positive, metavar="N", help="computing threads of each rank (default: cores / ranks)")
    add("--steps", type=positive, metavar="N", help="optimizer steps (default: that of the config)")
    add("--minutes", type=float, default=float("inf"), metavar="M", help="stop after M minutes and take stock")
    add("--name", type=run_name, metavar="NAME", help="folder of the run below runs/ (default: date and time)")
    add("--resume", action="store_true", help="continue the run --name, or the newest, from its last checkpoint")
    add("--seed", type=int, metavar="N", help="of the weights and the order of the text (default 0)")
    add("--config", type=Path, metavar="FILE", help="in DeepSpeed's format (default: tools/train/config.json)")
    add("--stage", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (default: that of the config)")
    add("--micro-batch", type=positive, metavar="N", help="windows of one rank's forward (default: the config's)")
    for name, (_key, what) in SPLITS.items():
        add(f"--{name}", type=positive, metavar="N", help=f"{what}; may change with --resume")
    add("--quick", action="store_true", help="a tiny model for a few seconds: to see that everything works")
    add("--runs", type=Path, default=TOOLS.parent / "runs", metavar="FOLDER", help="where runs are kept (runs/)")
    add("--die-at", type=int, default=0, metavar="STEP", help="SIGKILL after this step: to see --resume at work")
    return made


def positive(text: str) -> int:
    """An option's whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def run_name(text: str) -> str:
    """An option that becomes a folder name."""
    if not text or text != Path(text).name or text.startswith("."):
        raise argparse.ArgumentTypeError(f"{text!r} is not a plain folder name")
    return text


def choose_name(options: argparse.Namespace) -> str:
    """The run to start or to continue; ValueError when there is none, or one that would be overwritten."""
    runs: Path = options.runs
    if not options.resume:
        name = options.name or time.strftime("%Y-%m-%d_%H%M%S")
        if (runs / name / "run.json").exists():
            raise ValueError(
                f"{runs} has a run {name!r} already: continue it with --resume, or choose another --name"
            )
        return str(name)
    saved = sorted(runs.glob("*/checkpoints/latest"), key=lambda path: path.stat().st_mtime)
    names = [path.parents[1].name for path in saved]
    if not names:
        raise ValueError(f"nothing to resume: no run in {runs} has a checkpoint yet")
    if options.name and options.name not in names:
        raise ValueError(f"no run {options.name!r} in {runs} has a checkpoint; there are {', '.join(names)}")
    return str(options.name or names[-1])


def split_over(options: argparse.Namespace) -> int:
    """Ranks that work on one window, as far as the options say; those that share experts have their own."""
    return math.prod(getattr(options, name) or 1 for name in SPLITS if name != "expert")


def ranks_of(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """How many ranks to start: those asked for, else enough for the splits; those not given are the config's."""
    degrees = argparse.Namespace(**{name: getattr(options, name) or degree_of(config, name) for name in SPLITS})
    found: int = options.ranks or max(default_ranks(), split_over(degrees) * degrees.expert)
    return found


def degree_of(config: Mapping[str, Any], name: str) -> int:
    """Over how many ranks a config splits the model in the way that an option of this name does."""
    section: Any = config
    for key in SPLITS[name][0]:
        section = section.get(key, {})
    found: int = section or 1
    return found


def saved_config(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """That of the run to resume, whose splits go on where the options name no others; {} for a new run."""
    if not options.resume:
        return {}
    found: dict[str, Any] = json.loads((options.runs / name / "run.json").read_text())["config"]
    return found


def available_cores() -> int:
    """Cores that this process may use, which a container may limit."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_ranks() -> int:
    """Two, unless they would have to share the machine's only GPU, which NCCL refuses."""
    import torch

    return 1 if torch.cuda.device_count() == 1 else 2


class ControlLine:
    """The writing end of the ranks' standard input, and the signals that close it."""

    def __init__(self) -> None:
        self.signal = 0  # the first that came; 0 before
        reading, self._writing = os.pipe()  # not inheritable: only this process holds the writing end
        os.dup2(reading, 0)
        os.close(reading)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if self.signal:
            from torch.distributed.elastic.multiprocessing import SignalException

            raise SignalException("asked twice", signal.SIGKILL)  # what torchrun will end the ranks with
        self.signal = number
        os.close(self._writing)
        print("\nstopping after this step (once more to stop at once)", file=sys.stderr, flush=True)


def torchrun(ranks: int, arguments: list[str]) -> int:
    """Run main.py on so many ranks; the exit code of the first rank that failed, or 0."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.disable(logging.ERROR)  # torchrun's account of how each rank ended
    ours = "SIGHUP,SIGQUIT"  # what torchrun handles; SIGINT and SIGTERM are the control line's
    # --local-addr: the ranks are all here, and a container's host name may not resolve.
    options = ["--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={ranks}", f"--signals-to-handle={ours}"]
    try:
        run.run(run.parse_args([*options, "-m", "train.main", *arguments]))  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, failure = failed.get_first_failure()
        code = failure.exitcode
        if code < 0:
            print(f"train: rank {rank} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return 128 - code if code < 0 else code  # what a positive code means, the rank has said
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    return 0


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)
    try:
        name = choose_name(options)
    except ValueError as mistake:
        print(f"train: {mistake}", file=sys.stderr)
        return MISTAKE
    line = ControlLine()
    ranks = ranks_of(options, saved_config(options, name))
    threads = options.threads or max(1, available_cores() // ranks)
    path = os.pathsep.join(filter(None, [str(TOOLS), os.environ.get("PYTHONPATH")]))
    os.environ.update({"OMP_NUM_THREADS": str(threads), "PYTHONPATH": path, CONTROL: "1"})
    code = torchrun(ranks, [*arguments, "--name", name])
    if code not in (0, MISTAKE, DEFEAT) and (options.runs / name / "checkpoints" / "latest").exists():
        print(f"train: to go on: python3 tools/dev.py train --resume --name {name}", file=sys.stderr)
    return 128 + line.signal if line.signal else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
