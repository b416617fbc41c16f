"""Two ranks on the simulated device, Gloo in the place of NCCL: every row of the contract table trains."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

from zcomm.testing import run_ranks
from zpartition.layout.link import measure_link

CONTRACT = str(Path(__file__).parents[1] / "contract")
WORLD_SIZE = 2


@pytest.mark.timeout(300)
def test_every_row_trains_alike_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(CONTRACT)
    run, rows = (importlib.import_module(f"contract_table.{name}") for name in ("run", "rows"))
    oracle = importlib.import_module("contract_table.oracle")
    chosen = [row for row in rows.ROWS if WORLD_SIZE in row.worlds]
    cases = [run.Case(row, "plain", torch.float32, 1) for row in chosen]
    first, second = run_ranks(run.run_cases, WORLD_SIZE, cases, timeout_s=280)
    expected = oracle.curve("plain", torch.float32, WORLD_SIZE, 1)
    for case, one, other in zip(cases, first, second, strict=True):
        assert not isinstance(one, str), f"{case}: {one}"
        mean = [(a + b) / WORLD_SIZE for a, b in zip(one.losses, other.losses)]
        assert mean == pytest.approx(expected, rel=2e-6), case
        assert one.weights == other.weights, case
        if case.row.same_bits:
            assert one.weights == first[0].weights, case


def measure_on_device() -> float:
    return measure_link(None, torch.device("cuda", torch.cuda.current_device())).bytes_per_s


def test_ranks_agree_on_a_link_that_they_measure_on_the_device() -> None:
    first, second = run_ranks(measure_on_device, WORLD_SIZE)
    assert first == second > 0
