"""Write deepspeed_tables.json, the values of DeepSpeed's own schedules at each step, for test_build_deepspeed.py.

    python packages/zoptim/tests/schedules/deepspeed_tables.py

in an environment with DeepSpeed (0.19.8 made the file) and torch; it needs nothing of this repository.
"""

from __future__ import annotations

import itertools
import json
import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NUM_STEPS = 14
Case = tuple[str, list[float], dict[str, Any]]  # the schedule, each group's own lr, its parameters


def cases() -> Iterator[Case]:
    """Every parameter at its limits, then random combinations."""
    one, two = [0.01], [0.5, 0.25]
    for kind, steps in itertools.product(("log", "linear"), (1, 2, 5)):
        warm = {"warmup_num_steps": steps, "warmup_type": kind}
        yield "WarmupLR", two, warm
        yield "WarmupLR", two, {**warm, "warmup_min_lr": [0.1, 0.2], "warmup_max_lr": [0.3, 0.6]}
        yield "WarmupLR", one, {**warm, "warmup_min_lr": 0.1, "warmup_max_lr": 0.02}
        for total in (8, steps, 3):
            yield "WarmupDecayLR", two, {**warm, "total_num_steps": total}
            yield "WarmupCosineLR", two, {**warm, "total_num_steps": total}
        yield "WarmupDecayLR", two, {**warm, "total_num_steps": 9, "warmup_min_lr": 0.01, "warmup_max_lr": None}
        low = {"warmup_min_ratio": 0.2, "cos_min_ratio": 0.1}
        yield "WarmupCosineLR", one, {**warm, "total_num_steps": 9, **low}
    yield "WarmupLR", two, {}
    yield "WarmupDecayLR", two, {"total_num_steps": 2000}
    yield "WarmupCosineLR", two, {"total_num_steps": 2000}
    for size, staircase in itertools.product((1, 3), (False, True)):
        test = {"lr_range_test_step_size": size, "lr_range_test_staircase": staircase}
        yield "LRRangeTest", one, {**test, "lr_range_test_step_rate": 0.5}
        yield "LRRangeTest", two, {**test, "lr_range_test_min_lr": [0.01, 0.02]}
    yield "LRRangeTest", one, {}
    yield from cycles()


def cycles() -> Iterator[Case]:
    lrs = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}
    for first, second in ((3, None), (4, 2), (2, 4), (3, 0), (1, 1), (5, 4)):
        sizes = {**lrs, "cycle_first_step_size": first, "cycle_second_step_size": second}
        yield "OneCycle", [0.3], sizes
        for stairs in ((2, None), (3, 2), (2, 0), (0, 3)):
            counts = {"cycle_first_stair_count": stairs[0], "cycle_second_stair_count": stairs[1]}
            yield "OneCycle", [0.3], {**sizes, **counts}
    base = {**lrs, "cycle_first_step_size": 3, "cycle_second_step_size": 2}
    yield "OneCycle", [0.3], {**base, "decay_lr_rate": 0.5, "decay_step_size": 2}
    yield "OneCycle", [0.3], {**base, "decay_lr_rate": 0.5, "decay_step_size": 1, "decay_mom_rate": 0.01}
    yield "OneCycle", [0.3], {**base, "decay_step_size": 3, "decay_mom_rate": 0.02}
    yield "OneCycle", [0.3], {**base, "decay_lr_rate": 0.5, "decay_mom_rate": 0.01}
    yield "OneCycle", [0.3], {**base, "cycle_momentum": False}
    groups = {"cycle_min_lr": [0.01, 0.05], "cycle_max_lr": [0.1, 0.02]}
    momenta = {"cycle_min_mom": [0.7, 0.5], "cycle_max_mom": [0.9, 0.95]}
    for more in ({}, {"decay_lr_rate": 0.3, "decay_mom_rate": 0.005, "decay_step_size": 2}):
        yield "OneCycle", [0.3, 0.2], {**base, **groups, **more}
        yield "OneCycle", [0.3, 0.2], {**base, **momenta, **more}
        yield "OneCycle", [0.3, 0.2], {**base, **groups, **momenta, **more, "cycle_first_stair_count": 2}
    chance = random.Random(0)
    for _ in range(20):
        yield (
            "OneCycle",
            [0.3],
            {
                "cycle_min_lr": round(chance.uniform(0, 0.1), 3),
                "cycle_max_lr": round(chance.uniform(0.1, 1), 3),
                "cycle_first_step_size": chance.randint(1, 7),
                "cycle_second_step_size": chance.randint(0, 7),
                "cycle_first_stair_count": chance.choice((0, 1, 2, 3, 5)),
                "cycle_second_stair_count": chance.choice((0, 1, 2, 3, 5)),
                "decay_lr_rate": chance.choice((0.0, 0.1)),
                "decay_step_size": chance.choice((0, 1, 2)),
                "decay_mom_rate": chance.choice((0.0, 0.001)),
            },
        )


def trace(name: str, lrs: list[float], params: dict[str, Any]) -> dict[str, Any]:
    """One schedule from construction on: each group's lr and betas, and the results of get_lr and get_mom."""
    import torch
    from deepspeed.runtime import lr_schedules

    optimizer = torch.optim.AdamW([{"params": [torch.ones(2, requires_grad=True)], "lr": lr} for lr in lrs])
    schedule = getattr(lr_schedules, name)(optimizer, **params)

    def now() -> dict[str, Any]:
        groups = optimizer.param_groups
        momentum = schedule.get_mom() if hasattr(schedule, "get_mom") else None
        return {
            "lr": [rounded(group["lr"]) for group in groups],
            "get_lr": list(map(rounded, schedule.get_lr())),
            "betas": [list(map(rounded, group["betas"])) for group in groups],
            "get_mom": momentum and [list(map(rounded, pair)) for pair in momentum],
        }

    found = [now()]
    for _ in range(NUM_STEPS):
        schedule.step()
        assert schedule.get_last_lr() == schedule.get_lr()
        found.append(now())
    assert schedule.state_dict() == {"last_batch_iteration": NUM_STEPS - 1}
    assert all(step["lr"] == step["get_lr"] and step["get_mom"] in (None, step["betas"]) for step in found[1:])
    (second,) = {pair[1] for step in found for pair in step["betas"]}
    steps: dict[str, Any] = {"lr": [step["lr"] for step in found], "beta2": second}
    steps["beta1"] = [[pair[0] for pair in step["betas"]] for step in found]
    if all(firsts == steps["beta1"][0] for firsts in steps["beta1"]):
        steps["beta1"] = steps["beta1"][:1]  # constant
    first = {"get_lr": found[0]["get_lr"], "get_mom": found[0]["get_mom"]}  # before the first step
    return {"name": name, "own": lrs, "params": params, **steps, **first}


def rounded(value: float) -> float:
    return float(f"{value:.8g}")


def main() -> None:
    """Write the file next to this one."""
    logging.disable()
    tables = [json.dumps(trace(*case), separators=(",", ":")) for case in cases()]
    path = Path(__file__).with_suffix(".json")
    path.write_text("[\n" + ",\n".join(tables) + "\n]\n", encoding="utf-8")
    print(f"{path}: {len(tables)} schedules")


if __name__ == "__main__":
    main()
