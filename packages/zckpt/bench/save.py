"""Saving and loading a training state, beside the disk, torch DCP and DeepSpeed.

    python packages/zckpt/bench/save.py FOLDER [--params 124] [--ranks 2] [--rounds 5] [--minutes 3] [--out NAME]

Rank processes on one machine, each with its part of the weights and Adam moments of a GPT of this many million
parameters in fp32 (12 bytes each).  All contenders move the same bytes, take turns, and are timed from a barrier to
the last rank's end; the median of the rounds counts.  Each is warm: it runs once before the clock does.

    raw         a file for each of two threads of a rank, 8 MiB at a time through the page cache, fsync of file and
                folder; read by four threads a rank into memory that is there.  The floor.
    raw direct  the same with O_DIRECT and one thread a file
    zckpt       save() and Checkpoint.read() as they come: durable on return, every byte hashed, in place
    no hash     save() without its checksums, read(verify=False)
    first       read(verify="first"): proves all bytes before it touches a tensor
    DCP         torch.distributed.checkpoint, two threads, which fsyncs files and knows no checksums
    DeepSpeed   the checkpoint engine that it uses by default, if it can be imported: no fsync, no checksums; every
                rank loads the file it wrote

Before a load the contender's files are dropped from the page cache with fsync and posix_fadvise(DONTNEED), since
dropping all caches needs privileges that a bench should not have; a host below a virtual machine may keep them still.

A background save is timed against one copy of the same tensors into memory that is there (torch, same threads):
`blocked` is the call, `whole` until it is durable.  `extra` is how far the resident memory of a rank rises above
where it was, at its highest.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import zckpt
from zckpt import chunks, safefile

PIECE = 8 << 20
RESULTS = Path(__file__).with_name("results")


def shapes(millions: int) -> dict[str, tuple[int, ...]]:
    """A GPT with GPT-2's vocabulary, of about this many million parameters."""
    width = 64
    while 51281 * width + 12 * width**3 // 64 < millions * 1_000_000:  # a layer for every 64, as GPT-2
        width += 64
    layers = width // 64
    found = {"wte": (50257, width), "wpe": (1024, width)}
    for n in range(layers):
        for name, shape in {
            "ln1.weight": (width,), "ln1.bias": (width,), "attn.qkv.weight": (3 * width, width),
            "attn.qkv.bias": (3 * width,), "attn.out.weight": (width, width), "attn.out.bias": (width,),
            "ln2.weight": (width,), "ln2.bias": (width,), "mlp.up.weight": (4 * width, width),
            "mlp.up.bias": (4 * width,), "mlp.down.weight": (width, 4 * width), "mlp.down.bias": (width,),
        }.items():  # fmt: skip
            found[f"h.{n}.{name}"] = shape
    return found


class State:
    """One rank's part: a span of every weight and of its two moments."""

    def __init__(self, millions: int, rank: int, ranks: int) -> None:
        self.shards: list[zckpt.Shard] = []
        for name, shape in shapes(millions).items():
            box = tuple((0, size) for size in shape)
            numel = torch.Size(shape).numel()
            span = (numel * rank // ranks, numel * (rank + 1) // ranks)
            for key in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
                values = torch.rand(span[1] - span[0])
                self.shards.append(zckpt.Shard(f"{key}.{name}", shape, box, span, values))
        self.tensors = [shard.tensor for shard in self.shards]
        self.by_name = {f"{shard.name}.{rank}": shard.tensor for shard in self.shards}
        self.nbytes = sum(each.nbytes for each in self.tensors)

    def is_intact(self, expected: list[float]) -> bool:
        return [float(each.sum()) for each in self.tensors] == expected


class Contender:
    """A way to save the state into a folder of its own, and to load it back into the same tensors."""

    def __init__(self, state: State, folder: Path, rank: int) -> None:
        self.state, self.folder, self.rank = state, folder, rank

    def save(self) -> object: ...

    def load(self) -> object: ...


class Raw(Contender):
    """Bytes in the order of the tensors; lanes of them by size."""

    direct = 0

    def __init__(self, state: State, folder: Path, rank: int) -> None:
        super().__init__(state, folder, rank)
        data = torch.cat([each.view(torch.uint8) for each in state.tensors])  # contiguous: the floor pays no seams
        import mmap

        self.room = mmap.mmap(-1, len(data) // 2 * 2 + 4096)
        self.memory = memoryview(self.room)[: len(data) // 8192 * 8192]
        self.memory[:] = memoryview(data.numpy())[: len(self.memory)]
        half = len(self.memory) // 2
        self.lanes = [self.memory[:half], self.memory[half:]]

    def _path(self, lane: int) -> Path:
        return self.folder / f"raw{self.rank}-{lane}"

    def save(self) -> None:
        def write(lane: int) -> None:
            fd = os.open(self._path(lane), os.O_WRONLY | os.O_CREAT | self.direct, 0o666)
            for start in range(0, len(self.lanes[lane]), PIECE):
                part = self.lanes[lane][start : start + PIECE]
                if os.write(fd, part) != len(part):
                    raise OSError("a short write")
            os.fsync(fd)
            os.close(fd)

        together([lambda lane=lane: write(lane) for lane in range(2)])
        fd = os.open(self.folder, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def load(self) -> None:
        def read(lane: int, first: int) -> None:
            fd = os.open(self._path(lane), os.O_RDONLY | self.direct)
            for start in range(first * PIECE, len(self.lanes[lane]), 2 * PIECE):
                part = self.lanes[lane][start : start + PIECE]
                if os.preadv(fd, [part], start) != len(part):
                    raise OSError("a short read")
            os.close(fd)

        together([lambda lane=lane, first=first: read(lane, first) for lane in range(2) for first in range(2)])


class RawDirect(Raw):
    direct = os.O_DIRECT


def together(jobs: list[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


class Ours(Contender):
    verify: bool | str = True

    def save(self) -> None:
        zckpt.save(self.folder, "a", shards=self.state.shards, objects={}, peers=zckpt.group_peers())

    def load(self) -> None:
        zckpt.find(self.folder, "a").read(self.state.shards, verify=self.verify, peers=zckpt.group_peers())  # type: ignore[arg-type]


class First(Ours):
    verify = "first"


class Unhashed(Ours):
    verify = False

    def save(self) -> None:
        real = chunks.digests
        safefile.chunks.digests = lambda data, chunk: "0" * 16 * chunks.num_chunks(len(data), chunk)
        try:
            super().save()
        finally:
            safefile.chunks.digests = real


class DCP(Contender):
    def save(self) -> None:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(str(self.folder / "a"), thread_count=2)
        dcp.save(dict(self.state.by_name), storage_writer=writer)

    def load(self) -> None:
        import torch.distributed.checkpoint as dcp

        dcp.load(dict(self.state.by_name), storage_reader=dcp.FileSystemReader(str(self.folder / "a")))


class DeepSpeed(Contender):
    def __init__(self, state: State, folder: Path, rank: int) -> None:
        super().__init__(state, folder, rank)
        from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

        self.engine = TorchCheckpointEngine()
        self.path = str(folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")

    def save(self) -> None:
        self.engine.save(self.state.by_name, self.path)

    def load(self) -> None:
        for name, values in self.engine.load(self.path, map_location="cpu").items():
            self.state.by_name[name].copy_(values)


CONTENDERS = {
    "raw": Raw, "raw direct": RawDirect, "zckpt": Ours, "no hash": Unhashed, "first": First, "DCP": DCP,
    "DeepSpeed": DeepSpeed,
}  # fmt: skip


def drop(folder: Path) -> None:
    """The files of a folder out of the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


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
    times: dict[str, dict[str, list[float]]] = {name: {"save": [], "load": [], "extra": []} for name in made}
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
            if number:
                for key, value in (("save", save), ("load", load), ("extra", extra[0])):
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


def run_rank(rank: int, given: argparse.Namespace, root: str, results: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // given.ranks))
    dist.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=given.ranks,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    state = State(given.params, rank, given.ranks)
    names = [name for name in CONTENDERS if not given.only or name in given.only]
    times = race(rank, state, Path(root), names, given.rounds, given.minutes)
    times["async"] = (
        {} if given.only and "async" not in given.only else background(state, Path(root), rank, given.rounds)
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
    lines = ["| contender | save GB/s | of raw | load GB/s | of raw | extra MB a rank |", "|---|---|---|---|---|---|"]
    floor = middle.get("raw") or next(iter(middle.values()))
    for name, each in middle.items():
        if "save" in each:
            cells = [f"{nbytes / 1e9 / each[way]:.2f} | {floor[way] / each[way]:.2f}" for way in ("save", "load")]
            lines.append(f"| {name} | {' | '.join(cells)} | {each['extra'] / 1e6:.0f} |")
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
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        results = Path(folder) / "results.json"
        mp.spawn(run_rank, (given, folder, str(results)), given.ranks)
        told = json.loads(results.read_text())
    rounds = min(len(each["save"]) for name, each in told["times"].items() if "save" in each)
    text = table(told["nbytes"], medians(told["times"]))
    print(text)
    if given.out:
        RESULTS.mkdir(exist_ok=True)
        facts = {
            "params": given.params,
            "ranks": given.ranks,
            "rounds": rounds,
            "cores": os.cpu_count(),
            "load": load,
            **told,
        }
        (RESULTS / f"{given.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
        head = (
            f"# Saving and loading beside the disk and the peers\n\n{os.cpu_count()} cores, Linux "
            f"{platform.release()}, torch {torch.__version__}, {date.today()}. {told['nbytes'] / 1e9:.2f} GB on "
            f"{given.ranks} ranks, medians of {rounds} interleaved rounds, load of other work {load:.1f} at "
            "the start. Made by bench/save.py, which says what the contenders are.\n\n"
        )
        (RESULTS / f"{given.out}.md").write_text(head + text)


if __name__ == "__main__":
    main()
