"""All pieces of tools/gpu_acceptance.py on the simulated device, and all planted faults."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from acceptance.child import run_piece
from acceptance.plants import PLANTS
from acceptance.table import PIECES, Piece, choose
from acceptance.verdict import Judgement, State

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif("simulated_cuda.library" not in sys.modules, reason="runs on the simulated device")


@pytest.fixture(autouse=True)
def _contract_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "contract"))
    monkeypatch.setenv("ZCOMM_TESTING_BACKEND", "cpu:gloo,cuda:nccl")


@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.name)
def test_every_piece_holds_or_needs_a_gpu(piece: Piece, tmp_path: Path) -> None:
    verdict = run_piece(piece, tmp_path)
    expected = State.PASSED if piece.on_simulated else State.NOT_RUN
    assert verdict.state is expected, verdict
    assert {figure.judgement for figure in verdict.figures} <= {Judgement.NOT_MEASURED}


@pytest.mark.parametrize("plant", PLANTS)
def test_every_planted_fault_turns_its_piece_red(plant: str, tmp_path: Path) -> None:
    from simulated_cuda.library import library, take_violations

    (piece,) = choose(PLANTS[plant].piece)
    verdict = run_piece(piece, tmp_path, plant)
    library().sim_reset_order()
    take_violations()
    assert verdict.state is State.FAILED, verdict
    kind = "bytes differ" if plant.endswith("bit") else "nothing orders the two"
    expected = "has other weights" if plant == "offload-bit" else kind
    assert expected in verdict.reason + verdict.output, verdict
