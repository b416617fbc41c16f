"""Which part of a cold load is the disk, the memory that the page cache takes, the checksums, and zckpt.

    python packages/zckpt/bench/cold.py FOLDER [--params 62] [--rounds 7] [--only ROW ...]

One process reads a training state of 12 bytes a parameter by four threads into memory that it has touched, unless
said.  All rows take turns, each after the file has left the page cache, in two states of the free memory:

    given back  after three idle seconds: a virtual machine may have returned free pages to its host by then, which
                provides each one again when it is used
    at hand     after as many bytes of anonymous memory were touched and freed

Rows: `cache` reads through the page cache, `direct` with O_DIRECT, 8 MiB at a time; `+ hash` hashes each 512 KiB
(direct: each 8 MiB) after it is read; `fresh` reads into memory that was just mapped; `twice` reads and hashes into a
buffer, and reads again into the memory, as verify="first" has to: through the page cache, or the disk twice.  The
others are zckpt.Checkpoint.read.  GB/s are medians; compare a load with the row of the same way in the same state.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import xxhash
from contenders import PIECE, State, run
from save import drop

import zckpt

STEP = 512 << 10  # read through the page cache, then hashed
READERS = 4


def touch_and_free(nbytes: int) -> None:
    with mmap.mmap(-1, nbytes) as room:
        for start in range(0, nbytes, 4096):
            room[start] = 1


class RawReader:
    """Reads one file of `nbytes` by four threads, a quarter each."""

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path, self.nbytes = path, nbytes
        self.room = mmap.mmap(-1, nbytes)
        touched = memoryview(self.room)
        for start in range(0, nbytes, PIECE):
            touched[start : start + PIECE] = bytes(min(PIECE, nbytes - start))
        with open(path, "wb") as file:
            file.write(self.room)
            os.fsync(file.fileno())

    def read(self, *, direct: bool = False, hashes: bool = False, fresh: bool = False, drops: bool = False) -> None:
        """drops: into a buffer of one step for each thread."""
        room = mmap.mmap(-1, self.nbytes) if fresh else self.room
        step = STEP if hashes and not direct else PIECE

        def part(first: int, last: int) -> None:
            fd = os.open(self.path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            memory = memoryview(mmap.mmap(-1, step) if drops else room)
            for start in range(first, last, step):
                count = min(step, last - start)
                here = memory[:count] if drops else memory[start : start + count]
                if os.preadv(fd, [here], start) != count:
                    raise OSError("a short read")
                if hashes:
                    xxhash.xxh3_64_intdigest(here)
            os.close(fd)

        share = self.nbytes // READERS
        run([partial(part, share * number, share * (number + 1)) for number in range(READERS)])

    def read_twice(self, *, direct: bool = False) -> None:
        self.read(direct=direct, hashes=True, drops=True)
        self.read(direct=direct)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Elapsed and processor seconds."""
    cpu, start = time.process_time(), time.perf_counter()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--params", type=int, default=62, help="millions of parameters; 12 MB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", nargs="*", help="rows; default: all")
    options = parser.parse_args()
    state = State(options.params, 0, 1)
    nbytes = state.nbytes // (READERS * PIECE) * READERS * PIECE
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        raw = RawReader(folder / "raw", nbytes)
        zckpt.save(folder, "a", shards=state.shards, objects={})

        def load(verify: bool | str) -> None:
            zckpt.find(folder, "a").read(state.shards, verify=verify, readers=READERS)  # type: ignore[arg-type]

        rows: dict[str, Callable[[], object]] = {
            "cache": raw.read,
            "cache + hash": partial(raw.read, hashes=True),
            "cache, fresh": partial(raw.read, fresh=True),
            "direct": partial(raw.read, direct=True),
            "direct + hash": partial(raw.read, direct=True, hashes=True),
            "cache, twice": raw.read_twice,
            "direct, twice": partial(raw.read_twice, direct=True),
            "zckpt, verify=False": partial(load, False),
            "zckpt": partial(load, True),
            'zckpt, verify="first"': partial(load, "first"),
        }
        rows = {row: work for row, work in rows.items() if not options.only or row in options.only}
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(options.rounds + 1):  # the first round warms up
            for row, work in rows.items():
                for pages in ("given back", "at hand"):
                    drop(folder)
                    if pages == "given back":
                        time.sleep(3)
                    else:
                        touch_and_free(nbytes + (256 << 20))
                    found = seconds(work)
                    if number:
                        times.setdefault((row, pages), []).append(found)
    print("| read | given back: GB/s | processor s/GB | at hand: GB/s | processor s/GB |\n|---|---|---|---|---|")
    for row in rows:
        size = nbytes if not row.startswith("zckpt") else state.nbytes
        cells = []
        for pages in ("given back", "at hand"):
            wall, cpu = (statistics.median(each) for each in zip(*times[row, pages]))
            cells.append(f"{size / 1e9 / wall:.2f} | {cpu / (size / 1e9):.2f}")
        print(f"| {row} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
