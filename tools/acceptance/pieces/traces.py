"""The order of streams: programs are recorded on the device, and replayed with vector clocks.

The record is kept beside the report, so the replay can be repeated, and mended, without the device.  On a GPU the
same steps run under torch.profiler, whose kernels and copies say how much overlaps.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from typing import Any

import torch

from acceptance.bench import Bench
from acceptance.overlap import hidden_share
from acceptance.pieces.offload import training
from acceptance.recorder import recorded
from acceptance.replay import WAITS, needed_waits, violations
from acceptance.verdict import Figure
from zckpt.saving.background import HostMemory
from zengine.data.loaders.fetch import make_prefetcher
from zpartition import Offload, Tier

__all__ = ["PROGRAMS", "run"]

STEPS, BATCHES = 2, 5


def offload(device: torch.device) -> None:
    """Train with states on the host."""
    contender = training(device, "tiny", Offload(states=Tier.HOST))
    for _ in range(STEPS):
        contender.step()
    torch.cuda.synchronize()


def load(device: torch.device) -> None:
    """Use batches that are copied ahead."""
    pinned = [torch.arange(64).pin_memory() for _ in range(BATCHES)]
    for batch in make_prefetcher(device, num_ahead=2, num_workers=1)(iter(pinned)):
        batch.float().sum()
        del batch
        torch.empty(8, device=device)
    torch.cuda.synchronize()


def save(device: torch.device) -> None:
    """Copy a weight as a background save does, read the copy, and train on."""
    weight = torch.ones(64, device=device)
    (copy,) = HostMemory().copy_shards([_Shard(weight)])
    copy.tensor.add(0)
    weight.add_(1)
    torch.cuda.synchronize()


class _Shard:
    """A shard of one tensor."""

    global_shape, box, span = (64,), ((0, 64),), (0, 64)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.name, self.tensor = "weight", tensor


PROGRAMS: dict[str, Callable[[torch.device], None]] = {"offload": offload, "load": load, "save": save}


def run(bench: Bench) -> None:
    """Record, keep and replay each program."""
    kept: dict[str, Any] = {}
    for name, program in PROGRAMS.items():
        with without_checks(bench), recorded() as recorder:
            program(bench.device)
        entries = kept[name] = recorder.entries()
        bench.check(f"the replay of {name} ({len(entries)} entries) is ordered", violations(entries))
        bare = [entry for entry in entries if entry[0] not in WAITS]
        blind = [] if violations(bare) else ["without any wait it is ordered, too: the record sees nothing"]
        bench.check(f"the replay of {name} needs its waits", blind)
        if name != "offload":  # whose record is long
            needed, num_waits = needed_waits(entries)
            bench.checks.append(f"{name}: {needed} of {num_waits} waits are needed one by one")
    bench.keep("trace", json.dumps(kept, separators=(",", ":")))
    if not bench.is_simulated:
        profile(bench)


def profile(bench: Bench) -> None:
    """Profile steps of the large model, with states on the host."""
    from torch.profiler import ProfilerActivity

    contender = training(bench.device, "disk", Offload(states=Tier.HOST))
    contender.step()
    contender.step()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        contender.step()
        torch.cuda.synchronize()
    path = bench.folder / "trace.json"
    profiler.export_chrome_trace(str(path))
    share = hidden_share(json.loads(path.read_text())["traceEvents"])
    bench.figure(Figure(name="offload: share of the copies' time beside kernels", unit="", measured=share))


@contextlib.contextmanager
def without_checks(bench: Bench) -> Any:
    """Leave the judgement to the replay: the simulated device's own checker is off."""
    if not bench.is_simulated:
        yield
        return
    from simulated_cuda.library import library

    torch.cuda.synchronize()
    library().sim_checks(False)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        library().sim_reset_order()
        library().sim_checks(True)
