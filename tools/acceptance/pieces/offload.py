"""Offload: states on the host, updated ahead, or on disk.  Same bits as on the device, and what the copies cost.

The model is the stack of linear layers of zpartition's bench: 1.3 billion parameters in bf16 for the host, a quarter
of that for the disk.  Bits need the C kernels, which equal the GPU kernels; torch's AdamW on a CPU does not equal its
own on a GPU.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import statistics
from pathlib import Path
from typing import Any
from unittest import mock

import attrs
import repo
import torch
from torch import Tensor

import zoptim
import zpartition
from acceptance.bench import Bench, NotRunHere, tensor_bytes
from acceptance.verdict import Figure
from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition.offload import manager

__all__ = ["Contender", "disk", "host", "training"]

SETTINGS = {"host": (24, 3712, 8192), "disk": (24, 1856, 8192), "tiny": (3, 16, 8)}  # layers, width, batch
STEPS = 5  # that are timed, after two that make states and buffers


@attrs.define(eq=False)
class Contender:
    """A stack of layers under one policy."""

    partition: Any
    optimizer: torch.optim.Optimizer
    x: Tensor  # (batch, width)

    def step(self) -> None:
        """Train one step."""
        with self.partition.micro_step():
            self.partition.module(self.x).backward()
        self.partition.finish_gradients()
        self.partition.apply(self.optimizer.step)
        self.partition.zero_grad()

    def digest(self) -> str:
        """Return a digest of the weights."""
        total = hashlib.blake2b()
        for parameter in self.partition.module.parameters():
            total.update(tensor_bytes(parameter).numpy().data)
        return total.hexdigest()


def bench_module() -> Any:
    """Return zpartition's bench of offload: its model and its mover without overlap."""
    path = repo.package_folder("zpartition") / "bench" / "offload.py"
    spec = importlib.util.spec_from_file_location("bench_offload", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def training(device: torch.device, setting: str, offload: Offload, is_serial: bool = False) -> Contender:
    """Make a contender; the same weights and data in every call."""
    layers, width, batch = SETTINGS[setting]
    torch.manual_seed(0)
    module = bench_module()
    model = module.Stack(layers, width).to(device, torch.bfloat16)
    x = torch.randn(batch, width, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    optimizer = zoptim.AdamW(model.parameters(), lr=1e-3)
    policy = ZeroPolicy(bucket_numel=4 * width**2, offload=offload, overlap=not is_serial)
    plain: Any = vars(manager)["make_mover"]
    with mock.patch.object(manager, "make_mover", module.serial(plain) if is_serial else plain):
        return Contender(zpartition.shard(model, optimizer, policy=policy), optimizer, x)


def host(bench: Bench) -> None:
    """Compare states on the host, without overlap, and updated ahead, with states on the device."""
    on_host = Offload(states=Tier.HOST)
    ahead = Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD)
    ways = {
        "device": (Offload(), False),
        "host": (on_host, False),
        "serial": (on_host, True),
        "ahead": (ahead, False),
    }
    ms = compare(bench, bench.choose("host", "tiny"), ways)
    for name in ("host", "ahead"):
        figures = ms["device"], ms[name], ms["serial"]
        hidden = (figures[2] - figures[1]) / (figures[2] - figures[0]) if figures[2] > figures[0] else 0.0
        bench.figure(
            Figure(name=f"{name}: share of the cost of serial copies that is hidden", unit="", measured=hidden)
        )


def disk(bench: Bench) -> None:
    """Compare states in files with states on the device."""
    on_disk = Offload(states=Tier.DISK, directory=str(bench.folder))
    compare(bench, bench.choose("disk", "tiny"), {"device": (Offload(), False), "disk": (on_disk, False)})


def compare(bench: Bench, setting: str, ways: dict[str, tuple[Offload, bool]]) -> dict[str, float]:
    """Train the ways one after the other; return the milliseconds of a step, and compare weights and times."""
    if reason := [str(zoptim.kernels().cpu)] if not zoptim.has_kernels("cpu") else []:
        bench.skip("bits", f"the update on the host has no C kernels ({reason[0]})")
    if not zoptim.has_kernels(bench.device):
        raise NotRunHere(zoptim.kernels().gpu)
    ms, digests, peaks = dict[str, float](), dict[str, str](), dict[str, float]()
    for name, (offload, is_serial) in ways.items():
        torch.cuda.reset_peak_memory_stats()
        contender = training(bench.device, setting, offload, is_serial)
        contender.step()
        rounds = bench.times({name: contender.step}, STEPS)[name]
        ms[name], digests[name] = statistics.median(rounds) * 1e3, contender.digest()
        peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        del contender
        gc.collect()
        torch.cuda.empty_cache()
    if zoptim.has_kernels("cpu"):
        faults = [f"{name} has other weights" for name, found in digests.items() if found != digests["device"]]
        bench.check(f"{', '.join(ways)}: the same weights after {bench.choose(STEPS, 1) + 2} steps", faults)
    for name in ways:
        peer = ms["device"] if name != "device" else None
        bench.figure(Figure(name=f"{name}: step", unit="ms", measured=ms[name], peer=peer))
        bench.figure(Figure(name=f"{name}: peak of the device's memory", unit="GiB", measured=peaks[name]))
    left = sorted(path.name for path in Path(bench.folder).iterdir())
    bench.check("nothing is left on disk", [f"{name} is left" for name in left])
    return ms
