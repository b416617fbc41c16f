"""A world of one, and a real process group, each rank a process."""

import subprocess
import sys
from pathlib import Path

from zckpt import ALONE, Peers

PROGRAM = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
import zckpt

root, rank = sys.argv[1], int(sys.argv[2])
limit = timedelta(seconds=60)
dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2, timeout=limit)
peers = zckpt.group_peers()
assert (peers.rank, peers.world_size) == (rank, 2)
assert peers.exchange({"n": "x" * (1 + 5000 * rank)}) == [{"n": "x"}, {"n": "x" * 5001}]
own = zckpt.group_peers(dist.new_group(backend="gloo"))
live = torch.full((3,), float(rank))
shard = zckpt.Shard("w", (6,), ((0, 6),), (3 * rank, 3 * rank + 3), live)
with zckpt.AsyncSaver(own) as saver:
    for step in range(5):
        saver.save(f"{root}/ckpt", shards=[shard], step=step)
        for _ in range(20):
            dist.all_reduce(torch.ones(100))  # the training goes on over its own group
        live += 10
live.zero_()
assert zckpt.load(f"{root}/ckpt", tensors=[shard], peers=peers).step == 4
assert live.tolist() == [40.0 + rank] * 3
if rank == 1:
    import os, signal
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    zckpt.save(f"{root}/ckpt", shards=[shard], step=9, peers=peers)
except zckpt.CheckpointWriteError as error:
    assert "rank 0 lost its peers" in str(error), error
    assert time.monotonic() - start < 90
    print("told", flush=True)  # torch may abort such a process at its end
"""


def test_alone_is_rank_zero_of_one_and_exchanges_with_itself() -> None:
    peers: Peers = ALONE
    assert (peers.rank, peers.world_size) == (0, 1)
    assert peers.exchange({"a": [1, "b", None]}) == [{"a": [1, "b", None]}]


def test_ranks_save_in_the_background_load_and_are_told_of_a_death(tmp_path: Path) -> None:
    commands = [[sys.executable, "-c", PROGRAM, str(tmp_path), str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(each, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands]
    try:
        told = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert told[0][0] == "told\n", told
    assert ranks[1].returncode == -9
