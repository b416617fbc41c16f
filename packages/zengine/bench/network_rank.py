#!/usr/bin/env python3
"""One rank of the network bench: trains every contender in turn, prints a line of JSON for each on rank 0.

Started by network.py inside a namespace, with a job as its argument.  Ends when its standard input does.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
from typing import Any

import attrs
import torch
import torch.distributed as dist
from network_contenders import CONTENDERS, Setting
from network_link import sent_bytes

WARM_UP = 3  # steps


@attrs.frozen(kw_only=True)
class Job:
    """What one process does."""

    rank: int
    world: int
    store: str  # file of the rendezvous
    names: tuple[str, ...]  # contenders
    rounds: int
    steps: int  # timed, of each contender in each round
    setting: Setting

    @classmethod
    def read(cls, text: str) -> Job:
        """Inverse of `attrs.asdict` and JSON."""
        fields = json.loads(text)
        return cls(**{**fields, "names": tuple(fields["names"]), "setting": Setting.from_json(fields["setting"])})


def main() -> None:
    """All contenders, several times."""
    job = Job.read(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    store = dist.FileStore(job.store, job.world)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=job.world)
    for round_index in range(job.rounds):
        for name in job.names:
            answers: list[Any] = [None] * job.world
            dist.all_gather_object(answers, _measure(name, job))
            if job.rank == 0:
                print(json.dumps({"round": round_index, "name": name, "ranks": answers}), flush=True)
    dist.barrier()
    os._exit(0)  # peers may leave threads that never end


def _measure(name: str, job: Job) -> dict[str, float]:
    """Seconds, CPU seconds of this process and bytes that its namespace has sent, for one step."""
    step, close = CONTENDERS[name](job.setting)
    batches = [job.setting.batches(index, job.rank) for index in range(WARM_UP + job.steps)]
    for tokens in batches[:WARM_UP]:
        step(tokens)
    dist.barrier()
    sent, cpu_s, busy_s, began_s = sent_bytes(), time.process_time(), _busy_s(), time.perf_counter()
    for tokens in batches[WARM_UP:]:
        step(tokens)
    spent = time.perf_counter() - began_s, time.process_time() - cpu_s
    dist.barrier()
    spent = (*spent, sent_bytes() - sent, _busy_s() - busy_s)
    close()
    del step, close
    gc.collect()
    return dict(zip(("s", "cpu_s", "sent", "busy_s"), (value / job.steps for value in spent)))


def _busy_s() -> float:
    """CPU seconds of the whole machine, with the kernel's for packets that belong to no process."""
    with open("/proc/stat") as stat:
        user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
