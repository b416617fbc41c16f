"""Private parts of torch that are used; these fail by name on a torch without them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from zengine.telemetry._compat import begin_memory_history, end_memory_history


def test_cudas_allocator_can_be_recorded() -> None:
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert "enabled" in parameters
    assert callable(torch.cuda.memory._dump_snapshot)


def test_a_torch_without_the_record_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    assert not begin_memory_history()
    assert not end_memory_history(tmp_path / "snapshot")


def test_what_was_recorded_is_dumped_and_the_record_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    assert begin_memory_history()
    assert end_memory_history(tmp_path / "snapshot")
    assert calls[0]["max_entries"] > 0
    assert calls[1:] == [str(tmp_path / "snapshot"), {"enabled": None}]
