"""Seconds per step with optimizer states on the device, the host, on disk, and updated ahead, beside the floor.

    python packages/zpartition/bench/offload.py FOLDER [--layers 8] [--width 1024] [--rounds 5] [--device cpu|cuda]

A stack of linear layers in bf16 (8 of 4 x 1024 x 1024: 34 million parameters; on CUDA 24 of 4 x 3712 x 3712: 1.3
billion) with fp32 masters and AdamW.  All contenders exist at once and run in turns; the median over rounds is
reported.

    torch     no partition: the module's own bf16 parameters and fp32 masters, one after the other
    device    ZeroPolicy() without offload
    host      states on the host
    serial    the same, but every copy is waited for, and none starts before the end of backward (CUDA)
    ahead     the same, updated in the last backward (Speculation.LAST_BACKWARD)
    disk      states in files under FOLDER

The floor is the time to move a step's data: bytes per parameter times parameters, over the rate of one copy of that
size (host), or of one read and one write of it by the store alone (disk).  Both are measured here.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import zpartition
from zpartition import Offload, Speculation, Tier, ZeroPolicy
from zpartition.disk import DiskOptions, DiskStore
from zpartition.offload import manager

HOST_BYTES = 4 + 4 + 4 + 2  # gradient written and read in fp32, master read, weight written
DISK_BYTES = 12  # master and two moments: read, and written


class Stack(nn.Module):
    """(batch, width) -> a scalar."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, 4 * width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).unflatten(-1, (4, -1)).tanh().mean(-2)
        return x.float().square().mean()


class Serial:
    """A mover that waits for each of its copies."""

    def __init__(self, mover: Any) -> None:
        self.mover = mover

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.mover, name)
        if name not in ("fetch", "add", "send"):
            return found

        def move_and_wait(*args: Any) -> None:
            found(*args)
            torch.cuda.synchronize()

        return move_and_wait


def serial(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make`, a maker of movers, with copies that are waited for."""
    return lambda *args: Serial(make(*args))


def in_torch(options: argparse.Namespace) -> Callable[[Tensor], None]:
    torch.manual_seed(0)
    model = Stack(options.layers, options.width).to(options.device, torch.bfloat16)
    params = list(model.parameters())
    masters = [nn.Parameter(param.detach().float()) for param in params]
    optimizer = torch.optim.AdamW(masters, fused=True)

    def step(x: Tensor) -> None:
        model(x).backward()
        for param, master in zip(params, masters):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def partitioned(options: argparse.Namespace, offload: Offload, is_serial: bool = False) -> Callable[[Tensor], None]:
    torch.manual_seed(0)
    model = Stack(options.layers, options.width).to(options.device, torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    policy = ZeroPolicy(bucket_numel=4 * options.width**2, offload=offload, overlap=not is_serial)
    plain = manager.make_mover
    with mock.patch.object(manager, "make_mover", serial(plain) if is_serial else plain):
        partition = zpartition.shard(model, optimizer, policy=policy)

    def step(x: Tensor) -> None:
        with partition.micro_step():
            model(x).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()

    return step


def seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def host_floor(numel: int) -> float:
    """Seconds to move a step's bytes through memory: a copy reads and writes each byte once."""
    source, target = torch.ones(64 << 20, dtype=torch.uint8), torch.zeros(64 << 20, dtype=torch.uint8)
    best = min(seconds(lambda: target.copy_(source), "cpu") for _ in range(7))
    return numel * HOST_BYTES / (2 * source.nbytes / best)


def disk_floor(numel: int, folder: Path, num_threads: int) -> float:
    """Seconds for the store alone to read and write a step's bytes, in regions of 64 MiB."""
    size = 64 << 20
    with tempfile.TemporaryDirectory(dir=folder) as inner:
        store = DiskStore.create(Path(inner) / "store", DiskOptions(num_threads=num_threads, durable=False))
        regions = [(store.allocate(f"{i}", size), store.buffer(size)) for i in range(-(-numel * DISK_BYTES // size))]

        def both() -> None:
            for region, buffer in regions:
                store.write(region, buffer)
            store.commit()
            for transfer in [store.read(region, buffer) for region, buffer in regions]:
                transfer.wait()

        both()
        found = min(seconds(both, "cpu") for _ in range(3))
        store.close(remove=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--width", type=int, default=0)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    on_gpu = options.device == "cuda"
    options.layers = options.layers or (24 if on_gpu else 8)
    options.width = options.width or (3712 if on_gpu else 1024)
    options.folder.mkdir(parents=True, exist_ok=True)
    host = Offload(states=Tier.HOST)
    ahead = Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD)
    disk = Offload(states=Tier.DISK, directory=str(options.folder))
    contenders = {
        "torch": in_torch(options),
        "device": partitioned(options, Offload()),
        "host": partitioned(options, host),
        **({"serial": partitioned(options, host, is_serial=True)} if on_gpu else {}),
        "ahead": partitioned(options, ahead),
        "disk": partitioned(options, disk),
    }
    x = torch.randn(options.batch or (8192 if on_gpu else 256), options.width, device=options.device).bfloat16()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for index in range(options.rounds + 2):  # the first two make states and buffers
        for name, step in contenders.items():
            found = seconds(lambda run=step: run(x), options.device)
            times[name] += [found] if index >= 2 else []
    numel = options.layers * 4 * options.width**2
    floors = {"host": host_floor(numel), "disk": disk_floor(numel, options.folder, disk.num_calls)}
    print(f"{numel:,} parameters on {options.device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    for name, values in times.items():
        over = statistics.median(values) - statistics.median(times["device"])
        floor = f", {over:+.3f} s over device; floor {floors[name]:.3f} s" if name in floors else ""
        print(f"{name:8}{statistics.median(values):8.3f} s ({min(values):.3f} to {max(values):.3f}){floor}")


if __name__ == "__main__":
    main()
