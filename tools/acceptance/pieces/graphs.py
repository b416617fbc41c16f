"""Whole steps in a CUDA graph, at ZeRO stages 0 to 2: replayed steps equal steps that were launched one by one."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
import zengine
from acceptance.bench import Bench, NotRunHere, differing
from acceptance.verdict import Figure

__all__ = ["engine_at", "steps", "train"]

STEPS = 7  # enough to capture and to replay
PRECISIONS: dict[str, dict[str, Any]] = {"bf16": {"bf16": {"enabled": True}}, "fp32": {}}


def engine_at(stage: int, device: torch.device, precision: str = "bf16", width: int = 32) -> tuple[Any, Tensor]:
    """Return an engine and its batch, the same in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage},
        **PRECISIONS[precision],
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).to(device)
    return engine, x.bfloat16() if precision == "bf16" else x


def train(engine: Any, x: Tensor) -> None:
    """Train one step."""
    engine.backward(loss_of(engine, x))
    engine.step()


def loss_of(engine: Any, x: Tensor) -> Tensor:
    """Return the loss of a batch."""
    loss: Tensor = engine(x).float().square().mean()
    return loss


def steps(bench: Bench) -> None:
    """Train captured and plain engines of each stage and precision."""
    capture = getattr(zengine, "capture_step", None)
    if capture is None:
        raise NotRunHere("this zengine has no capture_step")
    zcomm.init()
    for precision in PRECISIONS:
        for stage in (0, 1, 2):
            plain, x = engine_at(stage, bench.device, precision)
            with contextlib.closing(plain):
                expected = weights_after(plain, partial(train, plain), x)
                eager = bench.seconds(partial(train, plain, x)) * 1e3
            captured, x = engine_at(stage, bench.device, precision)
            with contextlib.closing(captured):
                step = capture(captured, partial(loss_of, captured))
                claim = f"{precision}, stage {stage}: {STEPS} captured steps equal plain ones"
                bench.check(claim, differing(weights_after(captured, step, x), expected))
                name, ms = f"{precision}, stage {stage}: a replayed step", bench.seconds(partial(step, x)) * 1e3
                bench.figure(Figure(name=name, unit="ms", measured=ms, peer=eager))
    zcomm.init().close()


def weights_after(engine: Any, step: Any, x: Tensor) -> list[Tensor]:
    """Return the weights after some steps on batches that differ."""
    for index in range(STEPS):
        step(x * (1 + index / 8))
    return [parameter.detach().cpu() for parameter in engine.module.parameters()]
