"""Profilers chosen by the config, on two ranks at ZeRO stage 3."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.build.assemble import make_profilers
from zengine.config import Facts, load, resolve
from zengine.telemetry.stragglers import log_summary

WIDTH, BATCH = 16, 4
FORWARD = 2 * 2 * BATCH * WIDTH * WIDTH  # two layers


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def config(folder: str, **sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        **sections,
    }


def _train(folder: str) -> dict[str, Any]:
    """What one rank saw."""
    table, profile = f"{folder}/table.txt", {"enabled": True, "profile_step": 1, "output_file": f"{folder}/table.txt"}
    sections = {
        "flops_profiler": profile,
        "profiler": {"enabled": True, "start_step": 2, "steps": 2, "ranks": [1], "folder": f"{folder}/traces"},
        "comms_logger": {"enabled": True},
    }
    engine, *_ = zengine.initialize(model=model(), config=config(folder, **sections))
    for _ in range(4):
        engine.backward(engine(torch.ones(BATCH, WIDTH)).square().mean())
        engine.step()
    held = sum(param.untyped_storage().nbytes() for param in engine.module.parameters())
    summary = log_summary(show_straggler=True, return_dict=True)
    engine.close()
    return {"summary": summary, "table": Path(table).read_text(), "held": held}


def test_step_of_the_flops_profiler_chooses_the_profiled_step(tmp_path: Path) -> None:
    table = tmp_path / "table.txt"
    profile = {"enabled": True, "step": 2, "output_file": str(table)}
    engine, *_ = zengine.initialize(model=model(), config=config(str(tmp_path), flops_profiler=profile))
    seen = []
    for _ in range(4):
        engine.backward(engine(torch.ones(BATCH, WIDTH)).square().mean())
        engine.step()
        seen.append(table.exists())
    engine.close()
    assert seen == [False, False, True, True]


def test_profiles_traces_and_summaries_of_two_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_train, 2, str(tmp_path))
    whole = sum(param.numel() for param in model().parameters())
    assert first["held"] < whole * 4  # parameters are not there between steps, and counted all the same
    figures = dict(re.findall(r"^  (\w[\w ,]+?) {2,}([\d.]+)", first["table"], re.MULTILINE))
    assert figures["parameters"] == str(whole)
    assert float(figures["forward"]) == FORWARD / 1e3
    assert float(figures["backward, counted"]) == FORWARD * 1.5 / 1e3  # the gradient of the input is nobody's
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["trace_rank1_steps2-3.json"]
    assert json.loads((tmp_path / "traces" / "trace_rank1_steps2-3.json").read_text())["traceEvents"]
    for rank in (first, second):
        assert {"all_gather", "reduce_scatter", "stragglers"} <= set(rank["summary"])
        assert all(waits["for_others_ms"] >= 0 for waits in rank["summary"]["stragglers"].values())
    assert first["summary"]["stragglers"] == second["summary"]["stragglers"]


def test_what_is_off_is_absent() -> None:
    facts = Facts(world_size=2, replicas=2)
    assert make_profilers(resolve(load(config("")), facts)) == ()
    off = {name: {"enabled": False} for name in ("flops_profiler", "profiler", "comms_logger")}
    assert make_profilers(resolve(load(config("", **off)), facts)) == ()
    on = {name: {"enabled": True} for name in off}
    assert len(make_profilers(resolve(load(config("", **on)), facts))) == 3
