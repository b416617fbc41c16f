"""Real processes that are killed; this file, run as a script, is their parent.

    python packages/zckpt/tests/kills.py FOLDER ROUNDS [SEED]

In each round two ranks save step after step, by turns with save() and in the background, every third time replacing a
tag, and acknowledge each return.  At a random moment, or at a random operation of a random rank, both are killed with
SIGKILL, or one is and the other must be told within a limit.  Then the checkpoint that was acknowledged last, or the
one after, is there, is what `find` gives, and verifies.  The suite (test_saving.py) plays 12 rounds;
ZCKPT_KILLS=200 plays more.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import attrs
import torch

from zckpt import LOCAL, AsyncSaver, CheckpointWriteError, Shard, Storage, find, save
from zckpt.format.canonical import JSON
from zckpt.saving import plan as planning
from zckpt.testing import FaultyStorage

LIMIT_S = 20
TOLD = 7  # exit status of a rank that was told that its peer is gone


@attrs.frozen(eq=False)
class SocketPeers:
    """Two ranks, a line of JSON each way."""

    rank: int
    line: socket.socket
    heard: BinaryIO  # of the same socket
    world_size: int = 2

    def exchange(self, value: JSON) -> list[JSON]:
        self.line.sendall(json.dumps(value).encode() + b"\n")
        data = self.heard.readline()
        if not data.endswith(b"\n"):
            raise ConnectionError("the other rank is gone")
        theirs = json.loads(data)
        return [value, theirs] if self.rank == 0 else [theirs, value]


def shards(rank: int, step: int) -> list[Shard]:
    made = []
    for name, size in (("w", 40_000), ("v", 20_001), ("shared", 1000)):
        span = (0, size) if name == "shared" else (size * rank // 2, size * (rank + 1) // 2)
        made.append(Shard(name, (size,), ((0, size),), span, torch.full((span[1] - span[0],), float(step))))
    return made


def killer(number: int) -> Storage:
    """A disk whose operation of this number kills its process."""
    left = [number]

    def before(operation: str, path: Path) -> None:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return FaultyStorage(LOCAL, before)


def keep_saving(root: str, first: int, peers: SocketPeers, acknowledge: int, storage: Storage) -> None:
    """Returns only by an error of its peer."""
    step = first
    with AsyncSaver(peers) as saver:
        while True:
            tag = "again" if step % 3 == 0 else f"step-{step}"
            content = {"shards": shards(peers.rank, step), "objects": {"step": step}, "overwrite": tag == "again"}
            used = LOCAL if step == first else storage
            if step % 2:
                save(root, tag, step=step, peers=peers, storage=used, **content)
            else:
                saver.save(root, tag, step=step, storage=used, **content).wait()
            os.write(acknowledge, f"{step}\n".encode())
            step += 1


def rank_process(
    root: str, first: int, rank: int, lines: tuple[socket.socket, ...], acknowledge: int, storage: Storage
) -> int:
    """Fork; return the child's pid."""
    child = os.fork()
    if child:
        return child
    status, peers = 1, SocketPeers(rank, lines[rank], lines[rank].makefile("rb"))
    try:
        lines[1 - rank].close()  # or the other's end would stay open after its death
        keep_saving(root, first, peers, acknowledge, storage)
    except CheckpointWriteError as error:
        status = TOLD if "lost its peers" in str(error) else 1
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def end_of(pid: int) -> int:
    """How a process ended; AssertionError if it does not within the limit."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    raise AssertionError(f"rank process {pid} was told nothing in {LIMIT_S} s")


def play(root: str, last: int, draw: random.Random) -> int:
    """Run one round; return the step found after it."""
    mine, theirs = os.pipe()
    lines = socket.socketpair()
    victim, is_both, operation = draw.randrange(2), draw.random() < 0.6, draw.randrange(1, 60)
    by_time = draw.random() < 0.5
    pids = []
    for rank in range(2):
        storage = LOCAL if by_time or rank != victim else killer(operation)
        pids.append(rank_process(root, last + 1, rank, lines, theirs, storage))
    for line in lines:
        line.close()
    os.close(theirs)
    told = os.read(mine, 1)  # a first save has returned
    if by_time:
        time.sleep(draw.uniform(0, 0.1))
        os.kill(pids[victim], signal.SIGKILL)
    assert end_of(pids[victim]) == -signal.SIGKILL
    if is_both:
        os.kill(pids[1 - victim], signal.SIGKILL)
        end_of(pids[1 - victim])
    else:
        assert end_of(pids[1 - victim]) == TOLD
    while more := os.read(mine, 1 << 16):
        told += more
    os.close(mine)
    acknowledged = max(int(word) for word in told.split())
    found = find(root)
    found.verify()
    assert found.step in (acknowledged, acknowledged + 1), (found.step, acknowledged, found.notes)
    values = {float(value) for name in found.names() for value in found.tensor(name).unique()}
    assert values == {float(found.step)}
    return found.step


def main(root: str, rounds: int, seed: int) -> None:
    torch.set_num_threads(1)  # so that there is no thread which a fork would lose
    planning._MIN_NBYTES = 10_000  # several files and threads a rank
    last = 0
    for number in range(rounds):
        last = play(root, last, random.Random(f"{seed}, {number}"))
    save(root, "last", step=last + 1)
    print(f"{rounds} rounds, seed {seed}: {last} saves were there")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0)
