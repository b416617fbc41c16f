"""Checkpoints of CUDA tensors: saved, saved in the background while training goes on, loaded by another engine."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import torch
from torch import Tensor

import zckpt
import zcomm
from acceptance.bench import Bench, differing
from acceptance.pieces.graphs import engine_at, train
from acceptance.verdict import Figure

__all__ = ["run"]

BLOCKED = 1.25  # times one copy of the same bytes


def run(bench: Bench) -> None:
    """Compare what is loaded with what was saved, and how long a background save blocks."""
    numels = bench.choose([250_000_000] * 4, [4096, 1, 300])
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
    tensors = {
        f"{index}": torch.arange(numel, device=bench.device).remainder_(251).to(dtypes[index % len(dtypes)])
        for index, numel in enumerate(numels)
    }
    zckpt.save(bench.folder, "now", tensors=tensors)
    bench.check("what save wrote is loaded", load_faults(bench, "now", tensors, tensors))
    in_background(bench, tensors)
    with_engines(bench)


def load_faults(bench: Bench, tag: str, like: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """Return how tensors loaded into fresh memory of the device differ from the expected ones."""
    fresh = {name: torch.empty_like(tensor) for name, tensor in like.items()}
    zckpt.load(bench.folder, tag, tensors=fresh)
    return differing(list(fresh.values()), list(expected.values()))


def in_background(bench: Bench, tensors: dict[str, Tensor]) -> None:
    """Save twice in the background, and change the tensors as soon as the call returns."""
    blocked = 0.0
    with contextlib.closing(zckpt.AsyncSaver()) as saver:
        for tag in ("first", "second"):  # the first makes the pinned memory
            before = {name: tensor.clone() for name, tensor in tensors.items()}
            torch.cuda.synchronize()
            start = time.perf_counter()
            handle = saver.save(bench.folder, tag, tensors=tensors)
            blocked = time.perf_counter() - start
            for tensor in tensors.values():
                tensor.add_(1)
            handle.wait()
            faults = load_faults(bench, tag, tensors, before)
            bench.check(f"the {tag} background save has the values of its call", faults)
    pinned = {name: torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for name, each in tensors.items()}
    copy = bench.seconds(lambda: [pinned[name].copy_(each, non_blocking=True) for name, each in tensors.items()])
    gib = sum(tensor.nbytes for tensor in tensors.values()) / 2**30
    name = f"a background save of {gib:.1f} GiB blocks, beside one copy to pinned memory"
    bench.figure(Figure(name=name, unit="ms", measured=blocked * 1e3, peer=copy * 1e3, at_most=BLOCKED))


def with_engines(bench: Bench) -> None:
    """Save a trained engine, load it into a fresh one, and train both one more step."""
    zcomm.init()
    for stage in (0, 2, 3):
        saved, x = engine_at(stage, bench.device)
        with contextlib.closing(saved):
            train(saved, x)
            train(saved, x)
            saved.save_checkpoint(str(bench.folder / "engine"), f"stage-{stage}")
            train(saved, x)
            expected = weights(saved)
        loaded, x = engine_at(stage, bench.device)
        with contextlib.closing(loaded):
            train(loaded, x)
            loaded.load_checkpoint(str(bench.folder / "engine"), f"stage-{stage}")
            train(loaded, x)
            faults = differing(weights(loaded), expected)
            bench.check(f"stage {stage}: an engine that loads goes on with the same bits", faults)
    zcomm.init().close()


def weights(engine: Any) -> list[Tensor]:
    """Return the weights of an engine, whole, on the host."""
    return [tensor.detach().cpu() for tensor in engine.state_dict().values()]
