"""Windows of torch's profiler."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zengine.config.plan.telemetry import WindowPlan
from zengine.features import profiler_window
from zengine.features.profiler_window import ProfilerWindow, memory_timeline


class Run:
    """A run of steps that a feature watches; each step adds two tensors."""

    def __init__(self, feature: ProfilerWindow, *, rank: int = 0, done: int = 0) -> None:
        self.clock = SimpleNamespace(steps=done)
        self.parts = SimpleNamespace(world=SimpleNamespace(rank=rank, device=torch.device("cpu")))
        self.feature = feature
        feature.attach(self)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.feature.forward_begin((), {})
            torch.ones(1000) + torch.ones(1000)
            self.clock.steps += 1
            self.feature.step_end(SimpleNamespace(step=self.clock.steps))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def adds(path: Path) -> int:
    return [event.get("name") for event in json.loads(path.read_text())["traceEvents"]].count("aten::add")


def test_the_window_holds_its_steps_and_no_others(tmp_path: Path) -> None:
    run = Run(ProfilerWindow(WindowPlan(start_step=2, steps=3), tmp_path))
    run.steps(3)
    assert names(tmp_path) == []
    run.steps(4)
    run.feature.close()
    assert names(tmp_path) == ["trace_rank0_steps2-4.json"]
    assert adds(tmp_path / "trace_rank0_steps2-4.json") == 3


def test_a_disk_that_fails_is_told_and_training_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profile").write_text("a file where the folder should be")
    run = Run(ProfilerWindow(WindowPlan(start_step=1, steps=1), tmp_path / "profile"))
    run.steps(2)
    run.feature.close()
    (told,) = caplog.messages
    assert "the trace of steps 1 to 1" in told
    assert "training goes on" in told


@pytest.mark.parametrize(
    ("done", "steps", "files"),
    [
        (0, 1, ["trace_rank0_steps1-1.json"]),  # ends inside
        (1, 5, ["trace_rank0_steps2-2.json"]),  # resumed inside
        (7, 5, []),  # resumed behind
    ],
)
def test_a_run_that_begins_or_ends_inside_leaves_what_it_has(
    tmp_path: Path, done: int, steps: int, files: list[str]
) -> None:
    run = Run(ProfilerWindow(WindowPlan(start_step=1, steps=2), tmp_path), done=done)
    run.steps(steps)
    run.feature.close()
    run.feature.close()
    assert names(tmp_path) == files


def test_only_the_chosen_ranks_record(tmp_path: Path) -> None:
    for ranks, files in (((0, 1), []), ((), ["trace_rank2_steps1-1.json"])):
        run = Run(ProfilerWindow(WindowPlan(start_step=1, steps=1, ranks=ranks), tmp_path), rank=2)
        run.steps(2)
        assert names(tmp_path) == files


def test_without_cuda_a_snapshot_is_the_timeline_of_the_allocations(tmp_path: Path) -> None:
    run = Run(ProfilerWindow(WindowPlan(start_step=1, steps=1, memory_snapshot=True), tmp_path))
    run.steps(1)
    (points,) = json.loads((tmp_path / "memory_rank0.json").read_text()).values()
    used = [nbytes for _, nbytes in points]
    assert max(used) - min(used) >= 2 * 4000
    assert [when for when, _ in points] == sorted(when for when, _ in points)


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_on_cuda_the_allocator_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dump(path: Path) -> bool:
        path.write_text("dumped")
        return True

    fakes: dict[str, Callable[..., Any]] = {"begin_memory_history": lambda: True, "end_memory_history": dump}
    for name, fake in fakes.items():
        monkeypatch.setattr(profiler_window, name, fake)
    run = Run(ProfilerWindow(WindowPlan(start_step=1, steps=1, memory_snapshot=True), tmp_path))
    run.parts.world.device = torch.device("cuda")
    run.steps(1)
    assert names(tmp_path) == ["memory_rank0.pickle", "trace_rank0_steps1-1.json"]


def test_a_trace_without_allocations_has_no_timeline(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text('{"traceEvents": [{"name": "aten::add"}]}')
    assert memory_timeline(tmp_path / "trace.json") == {}
