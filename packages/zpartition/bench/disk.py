"""Gigabytes per second of the disk tier, beside a plain loop and the floor of the drive.

    python packages/zpartition/bench/disk.py FOLDER [--mib 512] [--rounds 7] [--out NAME]

All contenders move the same bytes to and from preallocated files in FOLDER, and end a write with fdatasync (the
store: with a commit).  They run in turns; the median over rounds is reported.

    floor  threads that each move 4 MiB at a time with O_DIRECT, aligned, without checksums: the drive's limit
    loop   one thread, 1 MiB at a time, with O_DIRECT: a few lines of Python
    sums   only the checksums, by eight threads: the processor's limit
    store  DiskStore with its defaults; regions of 64 MiB, all transfers submitted at once
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Callable
from datetime import date
from pathlib import Path

import torch

from zpartition.disk import DiskOptions, DiskStore
from zpartition.disk.memory import MemorySpan, aligned_buffer

REGION = 64 << 20
RESULTS = Path(__file__).with_name("results")


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class Raw:
    """pread and pwrite on one file, by some threads, in pieces of one size."""

    def __init__(self, path: Path, source: torch.Tensor, num_threads: int, piece: int) -> None:
        self.memory, self.num_threads, self.piece = MemorySpan.of(source, source.numel()), num_threads, piece
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        os.posix_fallocate(self.fd, 0, source.numel())

    def each(self, move: Callable[[memoryview, int], int]) -> None:
        starts, lock = iter(range(0, len(self.memory.bytes), self.piece)), threading.Lock()

        def run() -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                part = self.memory.bytes[start : start + self.piece]
                if move(part, start) != len(part):
                    raise OSError("a short transfer")

        threads = [threading.Thread(target=run) for _ in range(self.num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def write(self) -> None:
        self.each(lambda part, start: os.pwrite(self.fd, part, start))
        os.fdatasync(self.fd)

    def read(self) -> None:
        self.each(lambda part, start: os.preadv(self.fd, [part], start))


class Sums(Raw):
    """Only the checksums of the same bytes."""

    def write(self) -> None:
        self.each(lambda part, start: len(part) if zlib.crc32(part) >= 0 else 0)

    read = write


class Stored:
    """The same bytes in regions of a store."""

    def __init__(self, folder: Path, source: torch.Tensor, options: DiskOptions) -> None:
        self.store = DiskStore.create(folder, options)
        self.parts = list(source.split(REGION))
        self.regions = [self.store.allocate(str(n), part.numel()) for n, part in enumerate(self.parts)]
        self.write()  # both slots, as the raw files
        self.write()

    def write(self) -> None:
        for region, part in zip(self.regions, self.parts):
            self.store.write(region, part)
        self.store.commit()

    def read(self) -> None:
        transfers = [self.store.read(region, part) for region, part in zip(self.regions, self.parts)]
        for transfer in transfers:
            transfer.wait()


def measure(folder: Path, num_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Contender -> "write" and "read" -> gigabytes a second."""
    source = aligned_buffer(num_bytes)
    source.random_(0, 256)
    contenders: dict[str, Raw | Stored] = {
        "floor": Raw(folder / "floor", source, 8, 4 << 20),
        "loop": Raw(folder / "loop", source, 1, 1 << 20),
        "sums": Sums(folder / "sums", source, 8, 1 << 20),
        "store": Stored(folder / "store", source, DiskOptions()),
        "store, chunks of 4 MiB": Stored(folder / "large", source, DiskOptions(chunk_bytes=4 << 20)),
        "store, four threads": Stored(folder / "four", source, DiskOptions(num_threads=4)),
        "store, one thread": Stored(folder / "one", source, DiskOptions(num_threads=1)),
        "store, through the page cache": Stored(folder / "cached", source, DiskOptions(direct="never")),
    }
    times: dict[str, dict[str, list[float]]] = {name: {"write": [], "read": []} for name in contenders}
    for each in contenders.values():
        each.write()
    for _ in range(rounds):
        for name, each in contenders.items():
            times[name]["write"].append(seconds(each.write))
            times[name]["read"].append(seconds(each.read))
    for each in contenders.values():
        if isinstance(each, Stored):
            each.store.close(remove=True)
    return {
        name: {way: num_bytes / 1e9 / statistics.median(found) for way, found in both.items()}
        for name, both in times.items()
    }


def table(rates: dict[str, dict[str, float]]) -> str:
    lines = ["| contender | write GB/s | of the floor | read GB/s | of the floor |", "|---|---|---|---|---|"]
    floor = rates["floor"]
    for name, rate in rates.items():
        cells = [f"{rate[way]:.2f} | {rate[way] / floor[way]:.2f}" for way in ("write", "read")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the drive to measure")
    parser.add_argument("--mib", type=int, default=512, help="bytes that each contender moves")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", help="a name for files in results/, instead of printing only")
    given = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        rates = measure(Path(folder), given.mib << 20, given.rounds)
    print(table(rates))
    if given.out:
        facts = {"mib": given.mib, "rounds": given.rounds, "cores": os.cpu_count(), "load": load, "gb_per_s": rates}
        (RESULTS / f"{given.out}.json").write_text(json.dumps(facts, indent=1) + "\n")
        head = (
            f"# The disk tier beside the floor of the drive\n\n{os.cpu_count()} cores, Linux {platform.release()}, "
            f"torch {torch.__version__}, {date.today()}. {given.mib} MiB, medians of {given.rounds} interleaved "
            f"rounds, load of other work {load:.1f} at the start. Made by bench/disk.py, which says what the "
            "contenders are.\n\n"
        )
        (RESULTS / f"{given.out}.md").write_text(head + table(rates))


if __name__ == "__main__":
    main()
