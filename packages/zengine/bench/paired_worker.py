"""One checkout in the paired bench: prepares a case and measures it whenever a line arrives.

It uses only what checkouts of different ages have in common: public names, and the cases of zoptim's bench, which it
takes from the checkout (PAIRED_TREE).  A case of several ranks starts them, tells all of them to go, and answers with
the median over calls of the slowest rank.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

__all__ = ["CASES"]

Sample = Callable[[], list[float]]  # milliseconds of a few calls
RANKS = 2
MIB = 2**20
GPT = {"depth": 6, "width": 256, "heads": 4, "vocabulary": 4096, "context": 256}


def measured(call: Callable[[], object], number: int, before: Callable[[], object] = lambda: None) -> Sample:
    """Return the sample of `number` calls, each after `before`, which is not measured."""

    def sample() -> list[float]:
        times = []
        for _ in range(number):
            before()
            begin = time.perf_counter()
            call()
            times.append(1e3 * (time.perf_counter() - begin))
        return times

    return sample


def optimizer_step(case: str, total: int) -> Sample:
    """A step over one flat tensor; other memory is read before each, so that caches are cold."""
    sys.path.insert(0, f"{os.environ['PAIRED_TREE']}/packages/zoptim/bench")
    arenas, cases = importlib.import_module("arena"), importlib.import_module("cases")
    found = next(each for each in cases.CASES if each.name == case)
    arena = arenas.Arena(arenas.numels_of("flat", total), torch.device("cpu"))
    other = torch.ones(16 * MIB if total < 5e7 else 1)
    return measured(found.contenders[0].prepare(arena), max(2, 10**7 // total), other.sum)


def collective(op: str, mb: int, *, is_shared: bool) -> Sample:
    """A collective of this rank, float32, after a barrier."""
    import zcomm

    torch.set_num_threads(1)
    size, rank = zcomm.group_size(), zcomm.group_rank()
    part = mb * MIB // 4 // size
    large = zcomm.shared_empty(part * size, torch.float32).zero_() if is_shared else torch.zeros(part * size)
    small, own = torch.zeros(part), large[rank * part : (rank + 1) * part]
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: zcomm.all_reduce(large),
        "reduce_scatter": lambda: zcomm.reduce_scatter(small, large),
        "all_gather": lambda: zcomm.all_gather(large, own),
    }
    return measured(calls[op], max(4, 32 // mb), zcomm.barrier)


def training(stage: int, *, bf16: bool = False) -> Sample:
    """A training step of this rank, after a barrier."""
    import models

    import zcomm
    import zengine

    torch.set_num_threads(1)
    shape = models.Shape(**GPT)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zengine.initialize(model=models.make(shape), config=config)
    tokens = models.batch(shape, 2, 128, zcomm.group_rank())

    def step() -> None:
        engine.backward(engine(tokens))
        engine.step()

    return measured(step, 2, zcomm.barrier)


def tiny_step(stage: int) -> Sample:
    """Steps of a model of 544 parameters, where all is overhead."""
    import zengine

    torch.set_num_threads(1)
    config = {
        "train_batch_size": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": stage},
    }
    engine, *_ = zengine.initialize(model=nn.Linear(16, 32), config=config)
    batch = torch.randn(4, 16)

    def step() -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return measured(step, 60)


def initialize(num_layers: int) -> Sample:
    """`initialize` of layers of 16 x 16, after the first one of the process."""
    import zengine

    torch.set_num_threads(1)
    config = {"train_batch_size": 4, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    made: list[Any] = []

    def clean() -> None:
        for engine in made:
            engine.close()
        made.clear()
        gc.collect()

    def make() -> None:
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(num_layers)))
        made.append(zengine.initialize(model=model, config=config)[0])

    return measured(make, 3, clean)


_ALONE: dict[str, Callable[[], Sample]] = {
    **{
        f"{case} {total // 10**6}M": partial(optimizer_step, case, total)
        for case in ("adamw", "bf16", "8bit", "offload", "boundary")
        for total in (10**6, 10**7, 10**8)
        if case in ("adamw", "bf16", "8bit") or total == 10**7
    },
    "tiny step, stage 0": partial(tiny_step, 0),
    "tiny step, stage 2": partial(tiny_step, 2),
    "initialize, 16 tensors": partial(initialize, 8),
}
_TOGETHER: dict[str, Callable[[], Sample]] = {
    **{
        f"{op} {mb} MB, {'zero copy' if is_shared else 'staged'}": partial(collective, op, mb, is_shared=is_shared)
        for mb in (1, 64)
        for op in ("all_reduce", "reduce_scatter", "all_gather")
        for is_shared in (True, False)
    },
    **{
        f"training, stage {stage}, {'bf16' if bf16 else 'fp32'}": partial(training, stage, bf16=bf16)
        for bf16 in (False, True)
        for stage in (0, 1, 2, 3)
    },
}
CASES = (*_ALONE, *_TOGETHER)


def main() -> None:
    """Prepare, warm up, then answer every line with a number."""
    logging.disable(logging.WARNING)
    name = sys.argv[1]
    if name in _ALONE:
        sample = _ALONE[name]()
        answer(lambda: statistics.median(sample()))
    elif "RANK" in os.environ:
        import torch.distributed as dist

        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], world), rank=rank, world_size=world)
        answer(_TOGETHER[name]())
    else:
        with tempfile.TemporaryDirectory() as folder:
            lead(name, f"{folder}/store")


def lead(name: str, store: str) -> None:
    """Start the ranks and speak for them."""
    ranks = []
    for rank in range(RANKS):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "STORE": store}
        environ = {**os.environ, **{key: str(value) for key, value in place.items()}, "OMP_NUM_THREADS": "1"}
        ranks.append(
            subprocess.Popen(
                [sys.executable, __file__, name],
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )

    def hear() -> float:
        found = [json.loads(next(line for line in rank.stdout or () if line.startswith("ms "))[3:]) for rank in ranks]
        return statistics.median(map(max, zip(*found)))

    def go() -> float:
        for rank in ranks:
            print("go", file=rank.stdin, flush=True)
        return hear()

    hear()
    answer(go)


def answer(sample: Callable[[], Any]) -> None:
    """Print what `sample` returns, once to warm up and once for each line of standard input."""
    for _ in range(3):
        found = sample()
    print("ms", json.dumps(found), flush=True)
    for _ in sys.stdin:
        print("ms", json.dumps(sample()), flush=True)
    os._exit(0)  # peers may leave threads that never end; ranks end with their standard input


if __name__ == "__main__":
    main()
