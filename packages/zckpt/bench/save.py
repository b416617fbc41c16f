"""Benchmark of saving and loading a training state, against the raw disk, torch DCP and DeepSpeed.

    python packages/zckpt/bench/save.py FOLDER [--params 124] [--ranks 2] [--rounds 5] [--minutes 3] [--out NAME]

Rank processes on one machine hold their parts of the weights and Adam moments of a GPT of PARAMS million parameters
in fp32 (12 bytes each).  All contenders move the same bytes, take turns after one warm-up run, and are timed from a
barrier to the end of the last rank; the result is the median of the rounds.

    raw         one file for each of two threads per rank, 8 MiB at a time through the page cache, fsync of file and
                folder; read by two threads per file, a half each, into allocated memory
    raw direct  the same with O_DIRECT
    direct + hash  the same, and xxh3 of each 8 MiB is computed before it is written and compared after it was read:
                the floor of a checkpoint that verifies what it writes ("of verified")
    zckpt       save() and Checkpoint.read() with defaults: durable on return, every byte hashed, in place
    no hash     save() without checksums, read(verify=False)
    first       read(verify="first"): verifies all bytes before it modifies a tensor
    torch       torch.save and torch.load, a file per rank, with an fsync; a CRC-32
    DCP         torch.distributed.checkpoint, two threads; fsyncs files, no checksums
    DeepSpeed   its default checkpoint engine, if it can be imported: no fsync, no checksums; every rank loads the
                file it wrote; and the same with an fsync, without which a save returns before anything is on disk

Before a cold load, the contender's files are dropped from the page cache with fsync and posix_fadvise(DONTNEED), as
dropping all caches needs privileges; the host of a virtual machine may still cache them.  Before a warm load, every
file is read through the page cache.  "of floor" compares with the faster of raw and raw direct, "of verified" with
direct + hash.

A background save is compared with one copy of the same tensors into allocated memory (torch, same threads): `blocked`
is the duration of the call, `whole` the time until it is durable.  `extra` is the peak increase of a rank's resident
memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from contenders import CONTENDERS, PIECE, State

import zckpt

RESULTS = Path(__file__).with_name("results")


def drop(folder: Path) -> None:
    """The files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm_up(folder: Path) -> None:
    """The files of a folder into the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb", buffering=0) as file:
                while file.read(PIECE):
                    pass


def timed(work: Callable[[], object]) -> float:
    """Seconds from a barrier to the last rank's end."""
    gc.collect()
    dist.barrier()
    start = time.perf_counter()
    work()
    mine = torch.tensor([time.perf_counter() - start])
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return float(mine)


def resident(key: str) -> int:
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key + ":"))


def extra_bytes(work: Callable[[], object]) -> int:
    """How far the resident memory rises while it works."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = resident("VmRSS")
    work()
    return max(resident("VmHWM") - before, 0)


def race(
    rank: int, state: State, root: Path, names: list[str], rounds: int, minutes: float
) -> dict[str, dict[str, list[float]]]:
    made = {}
    for name in names:
        try:
            made[name] = CONTENDERS[name](state, root / name.replace(" ", "-"), rank)
        except ImportError:
            continue
    expected = [float(each.sum()) for each in state.tensors]
    times: dict[str, dict[str, list[float]]] = {
        name: {"save": [], "load": [], "warm": [], "extra": []} for name in made
    }
    end = time.monotonic() + 60 * minutes
    for number in range(rounds + 1):  # the first round warms up
        late = torch.tensor([float(number > 1 and time.monotonic() > end)])
        dist.all_reduce(late)
        if late:
            break
        for name, each in made.items():
            if rank == 0:
                shutil.rmtree(each.folder, ignore_errors=True)
                each.folder.mkdir()
            dist.barrier()
            extra: list[float] = []
            save = timed(lambda each=each, extra=extra: extra.append(extra_bytes(each.save)))
            dist.barrier()
            if rank == 0:
                drop(each.folder)
            load = timed(each.load)
            dist.barrier()
            if rank == 0:
                warm_up(each.folder)
            warm = timed(each.load)
            if number:
                for key, value in (("save", save), ("load", load), ("warm", warm), ("extra", extra[0])):
                    times[name][key].append(value)
        dist.barrier()
    if not state.is_intact(expected):
        raise RuntimeError("a contender did not bring the state back")
    return times


def background(state: State, root: Path, rank: int, rounds: int) -> dict[str, list[float]]:
    """Seconds: blocked, whole, one copy."""
    group = dist.new_group(backend="gloo")
    room = [each.clone() for each in state.tensors]
    found: dict[str, list[float]] = {"blocked": [], "whole": [], "copy": []}

    def copy() -> None:
        for target, source in zip(room, state.tensors):
            target.copy_(source)

    if rank == 0:
        shutil.rmtree(root / "async", ignore_errors=True)
    dist.barrier()
    with zckpt.AsyncSaver(peers=zckpt.group_peers(group)) as saver:
        for number in range(rounds + 1):
            copied = timed(copy)

            def begin(number: int = number) -> None:
                saver.save(root / "async", "a", shards=state.shards, step=number, overwrite=True)

            start = time.perf_counter()
            blocked = timed(begin)
            saver.wait()
            whole = time.perf_counter() - start
            if number:
                for key, value in (("blocked", blocked), ("whole", whole), ("copy", copied)):
                    found[key].append(value)
    return found


def run_rank(rank: int, options: argparse.Namespace, root: str, results: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // options.ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=options.ranks,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    state = State(options.params, rank, options.ranks)
    names = [name for name in CONTENDERS if not options.only or name in options.only]
    times = race(rank, state, Path(root), names, options.rounds, options.minutes)
    times["async"] = (
        {} if options.only and "async" not in options.only else background(state, Path(root), rank, options.rounds)
    )
    total = torch.tensor([state.nbytes])
    dist.all_reduce(total)
    if rank == 0:
        Path(results).write_text(json.dumps({"nbytes": int(total), "times": times}))
    dist.barrier()
    dist.destroy_process_group()


def medians(times: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    return {name: {key: statistics.median(got) for key, got in each.items() if got} for name, each in times.items()}


def table(nbytes: int, middle: dict[str, dict[str, float]]) -> str:
    ways = "save GB/s | of floor | of verified | cold load GB/s | of floor | of verified"
    lines = [f"| contender | {ways} | warm load GB/s | extra MB a rank |", "|" + "---|" * 9]
    raw = [middle[name] for name in ("raw", "raw direct") if name in middle] or [next(iter(middle.values()))]
    floor = {way: min(each[way] for each in raw) for way in ("save", "load")}
    verified = middle.get("direct + hash", {"save": math.nan, "load": math.nan})
    for name, each in middle.items():
        if "save" in each:
            cells = [
                f"{nbytes / 1e9 / each[way]:.2f} | {floor[way] / each[way]:.2f} | {verified[way] / each[way]:.2f}"
                for way in ("save", "load")
            ]
            warm = f"{nbytes / 1e9 / each['warm']:.2f}"
            lines.append(f"| {name} | {' | '.join(cells)} | {warm} | {each['extra'] / 1e6:.0f} |")
    notes = []
    if "no hash" in middle and "zckpt" in middle:
        share = 1 - middle["no hash"]["save"] / middle["zckpt"]["save"]
        notes.append(f"Checksums: {100 * share:.0f}% of the save.")
    if middle.get("async"):
        each = middle["async"]
        notes.append(
            f"In the background: blocked {1000 * each['blocked']:.0f} ms, {each['blocked'] / each['copy']:.2f} of a "
            f"copy of the state ({1000 * each['copy']:.0f} ms); durable after {each['whole']:.2f} s."
        )
    return "\n".join([*lines, "", *notes]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the disk to measure; needs room for all contenders")
    parser.add_argument("--params", type=int, default=124, help="millions of parameters; 12 MB each")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=3, help="after which no further round begins")
    parser.add_argument("--only", nargs="*", help=f"contenders, of {', '.join(CONTENDERS)}, async")
    parser.add_argument("--out", help="a name for files in results/, instead of printing only")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        results = Path(folder) / "results.json"
        mp.spawn(run_rank, (options, folder, str(results)), options.ranks)
        measured = json.loads(results.read_text())
    rounds = min(len(each["save"]) for name, each in measured["times"].items() if "save" in each)
    text = table(measured["nbytes"], medians(measured["times"]))
    print(text)
    if options.out:
        RESULTS.mkdir(exist_ok=True)
        facts = {
            "params": options.params,
            "ranks": options.ranks,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load": load,
            **measured,
        }
        (RESULTS / f"{options.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
        head = (
            f"# Saving and loading beside the disk and the peers\n\n{os.cpu_count()} cores, Linux "
            f"{platform.release()}, torch {torch.__version__}, {date.today()}. {measured['nbytes'] / 1e9:.2f} GB on "
            f"{options.ranks} ranks, medians of {rounds} interleaved rounds, load of other work {load:.1f} at "
            "the start. Made by bench/save.py, which describes the contenders: "
            f"`python packages/zckpt/bench/save.py FOLDER --params {options.params} --ranks {options.ranks} --rounds "
            f"{options.rounds} --minutes {options.minutes:g}`.\n\n"
        )
        (RESULTS / f"{options.out}.md").write_text(head + text)


if __name__ == "__main__":
    main()
