"""What the engine costs a step at world 1, over the loop that one would write without it.

    .venv/bin/python packages/zengine/bench/overhead.py [--json FILE]

A model of 544 parameters, where nothing is computed and all is overhead.  Variants run interleaved (A B C A B C) on
one thread; printed are medians of processor time, which neighbours on a shared machine disturb less than wall time,
in milliseconds a step, and the difference to the bare loop: forward, backward, AdamW and zero_grad, with and
without torch's clipping.  Then, on a step that takes about 50 ms, what telemetry adds when it is on (phase timers,
throughput, TensorBoard) and when it is off; its own threads count.
"""

from __future__ import annotations

import argparse
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import zengine

Step = Callable[[], object]
DEEPSPEED_NOTE = "DeepSpeed 0.19.8, as documented: initialize 3-4 s and 127 MB; a step at world 1 is not published"


def bare(model: nn.Module, batch: torch.Tensor, *, clip: float) -> Step:
    """The plain loop, with torch's fastest AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        loss = model(batch).square().mean()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: nn.Module, batch: torch.Tensor, **config: object) -> Step:
    """The same through an engine."""
    base = {"train_batch_size": len(batch), "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
    engine, *_ = zengine.initialize(model=model, config={**base, **config})

    def step() -> None:
        engine.backward(engine(batch).square().mean())
        engine.step()

    return step


def medians(variants: dict[str, Step], rounds: int) -> dict[str, float]:
    """Milliseconds of each variant, interleaved, after a warm-up."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(rounds + rounds // 10 + 1):
        for name, step in variants.items():
            begin = time.process_time()
            step()
            if index > rounds // 10:
                times[name].append(1e3 * (time.process_time() - begin))
    return {name: statistics.median(values) for name, values in times.items()}


def tiny(rounds: int) -> dict[str, float]:
    """544 parameters."""
    batch = torch.randn(4, 16)

    def model() -> nn.Module:
        return nn.Linear(16, 32)

    return medians(
        {
            "bare loop": bare(model(), batch, clip=0),
            "bare loop, clipping": bare(model(), batch, clip=1.0),
            "zengine, no clipping": ours(model(), batch, gradient_clipping=0),
            "zengine, clipping": ours(model(), batch, gradient_clipping=1.0),
            "zengine, clipping, stage 2": ours(model(), batch, gradient_clipping=1.0, zero_optimization={"stage": 2}),
            "zengine, clipping, bf16": ours(model(), batch.bfloat16(), gradient_clipping=1.0, bf16={"enabled": True}),
        },
        rounds,
    )


def telemetry(rounds: int, folder: str) -> dict[str, float]:
    """A step of about 50 ms, with what telemetry there is and with none: the best of three engines of each kind, for
    where the allocator puts 4 million weights decides about more than telemetry does.
    """
    torch.manual_seed(0)
    width = 1024
    batch = torch.randn(128, width)

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    board = {"enabled": True, "output_path": folder, "job_name": "bench"}
    measuring = {"tensorboard": board, "wall_clock_breakdown": True, "steps_per_print": 1000}
    kinds: dict[str, dict[str, object]] = {"telemetry off": {}, "telemetry on": measuring}
    order = ["telemetry off", "telemetry on", "telemetry on", "telemetry off", "telemetry off", "telemetry on"]
    variants = {f"{name} {index}": ours(model(), batch, **kinds[name]) for index, name in enumerate(order)}
    found = medians({"bare loop, clipping": bare(model(), batch, clip=1.0), **variants}, rounds)
    best = {name: min(value for key, value in found.items() if key.startswith(name)) for name in kinds}
    return {"bare loop, clipping": found["bare loop, clipping"], **best}


def table(title: str, found: dict[str, float], base: str) -> None:
    """Print medians, and the difference to `base`."""
    print(title)
    for name, milliseconds in found.items():
        difference = milliseconds - found[base]
        print(f"  {name:28} {milliseconds:9.3f} ms  {difference:+8.3f} ms  {100 * difference / found[base]:+6.1f} %")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2000, help="steps of each variant on the tiny model")
    parser.add_argument("--long-rounds", type=int, default=25, help="steps of each engine at 50 ms")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("zengine").setLevel(logging.ERROR)
    print(f"torch {torch.__version__}, {platform.machine()}; {DEEPSPEED_NOTE}")
    results = {"tiny_ms": tiny(options.rounds)}
    table("544 parameters, a step:", results["tiny_ms"], "bare loop")
    with tempfile.TemporaryDirectory() as folder:
        results["telemetry_ms"] = telemetry(options.long_rounds, folder)
    table("4 M parameters, a step:", results["telemetry_ms"], "telemetry off")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
