"""Checkpoints of an earlier commit (5b8e09b), in fixtures/, resume with the losses of that commit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from everything import KINDS, seed_all, train

FIXTURES = Path(__file__).parent / "fixtures"

# (loss, rates) of the two steps that followed
WENT_ON = {
    ("ours", 1): [(0.2503414824604988, (0.020505216991072366,)), (0.1338379606604576, (0.0225,))],
    ("torch", 3): [
        (0.10893983393907547, (0.011619830424103306, 0.02323966084820661)),
        (0.07934928871691227, (0.020566684770626315, 0.04113336954125263)),
    ],
}


@pytest.mark.parametrize(("kind", "stage"), WENT_ON)
def test_an_older_checkpoint_resumes(tmp_path: Path, kind: str, stage: int) -> None:
    shutil.copytree(FIXTURES / f"{kind}-{stage}", tmp_path / f"{kind}-{stage}")
    seed_all(5)
    engine = KINDS[kind](stage)
    _, client_state = engine.load_checkpoint(tmp_path, f"{kind}-{stage}")
    assert (client_state, engine.global_steps) == ({"epoch": 3}, 2)
    for report, (loss, rates) in zip(train(engine, iter(engine.training_dataloader), 2), WENT_ON[kind, stage]):
        bound = 5e-2 if kind == "torch" else 1e-2  # in bf16; norms with running statistics had bf16 weights
        assert report.loss == pytest.approx(loss, rel=bound)
        assert report.lr == pytest.approx(rates)
    engine.close()
