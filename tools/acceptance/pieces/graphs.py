"""Whole steps in a CUDA graph, at ZeRO stages 0 to 2: the replayed steps equal steps that were launched one by one.

Forward, backward and the engine's step are captured after a few steps on a side stream, as torch.cuda.graph demands.
A stage whose step waits for the host cannot be captured: its reason is torch's.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
import zengine
from acceptance.bench import Bench, differing
from acceptance.verdict import Figure

__all__ = ["steps"]

WARM_STEPS, STEPS = 3, 3
CONFIG = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
WIDTH = 32


def engine_at(stage: int, device: torch.device) -> tuple[Any, Tensor]:
    """Return an engine and its batch, the same in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    config = {**CONFIG, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    engine, *_ = zengine.initialize(model=model, config=config)
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    return engine, x.to(device, torch.bfloat16)


def train(engine: Any, x: Tensor) -> None:
    """Train one step."""
    engine.backward(engine(x).float().square().mean())
    engine.step()


def steps(bench: Bench) -> None:
    """Capture and replay a step of each stage."""
    zcomm.init()
    for stage in (0, 1, 2):
        plain, x = engine_at(stage, bench.device)
        with contextlib.closing(plain):
            for _ in range(WARM_STEPS + STEPS):
                train(plain, x)
            expected = [parameter.detach().cpu() for parameter in plain.module.parameters()]
            eager = bench.seconds(partial(train, plain, x)) * 1e3
        captured, x = engine_at(stage, bench.device)
        with contextlib.closing(captured):
            try:
                graph = capture(captured, x)
            except RuntimeError as reason:
                forget_violations(bench)
                bench.skip(f"stage {stage}", f"cannot be captured: {str(reason).splitlines()[0]}")
                continue
            for _ in range(STEPS):
                graph.replay()
            torch.cuda.synchronize()
            found = [parameter.detach().cpu() for parameter in captured.module.parameters()]
            bench.check(f"stage {stage}: {STEPS} replayed steps equal launched ones", differing(found, expected))
            ms = bench.seconds(graph.replay) * 1e3
            name = f"stage {stage}: a replayed step beside a launched one"
            bench.figure(Figure(name=name, unit="ms", measured=ms, peer=eager))
    zcomm.init().close()


def capture(engine: Any, x: Tensor) -> Any:
    """Return a graph of one step.  Raises RuntimeError for a step that cannot be captured."""
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_STEPS):
            train(engine, x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(engine, x)
    return graph


def forget_violations(bench: Bench) -> None:
    """Forget what the simulated device noted in a capture that was given up."""
    torch.cuda.synchronize()
    if bench.is_simulated:
        from simulated_cuda.library import library, take_violations

        library().sim_reset_order()
        take_violations()
