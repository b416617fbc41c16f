"""The planner: the peak that it predicts for a rank against the allocator's, for training steps on the device."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import zcomm
import zengine
from acceptance.bench import Bench
from acceptance.verdict import Figure
from zengine.config import Facts, load, resolve
from zengine.planning.measured import measure
from zengine.planning.models import Shape, Transformer, token_batches
from zengine.planning.sizes import Workload, peak

__all__ = ["run"]

MIB = 2**20
ERROR = 0.1
CASES = (("fp32", 0, 1), ("bf16", 0, 1), ("bf16", 2, 2), ("bf16", 3, 1))  # dtype, stage, micro-steps


def run(bench: Bench) -> None:
    """Plan and measure each configuration."""
    zcomm.init()
    shape = bench.choose(Shape(layers=12, width=1024, vocabulary=32_000), Shape(layers=1, width=32, vocabulary=64))
    batch, micro_batch = token_batches(bench.choose(512, 8)), bench.choose(8, 2)
    for dtype, stage, micro_steps in CASES:
        config = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": micro_steps,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            "zero_optimization": {"stage": stage},
            **({dtype: {"enabled": True}} if dtype != "fp32" else {}),
        }
        plan = resolve(load(config), Facts(world_size=1, replicas=1, device_type="cuda"))
        with torch.device("meta"):
            module = plan.precision.cast_module(Transformer(shape))
        predicted = peak(Workload(module=module, batch=batch, device="cuda"), plan, micro_batch, 1).total

        def start(model: nn.Module, config: dict[str, Any] = config) -> Any:
            return zengine.initialize(model=model, config=config)[0]

        gc.collect()
        found = measure(lambda: Transformer(shape), batch, start, micro_batch=micro_batch, device="cuda")
        name = f"{dtype}, stage {stage}, {micro_steps} x {micro_batch}"
        states = 12 * sum(parameter.numel() for parameter in module.parameters())  # master and two moments
        faults = [] if found.peak >= found.between_steps >= states else [f"{found}, and {states} bytes of states"]
        bench.check(f"{name}: states are on the device between steps", faults)
        measured, low, high = found.peak / MIB, 1 - ERROR, 1 + ERROR
        bench.figure(
            Figure(name=name, unit="MiB", measured=measured, predicted=predicted / MIB, at_least=low, at_most=high)
        )
    zcomm.init().close()
