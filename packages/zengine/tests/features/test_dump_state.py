"""The printed plan."""

from __future__ import annotations

from torch import nn

import zengine


def test_dump_state_prints_the_plan_with_origins_and_the_bytes(capsys):
    zengine.initialize(model=nn.Linear(2, 1), config={"train_batch_size": 1, "dump_state": True})
    printed = capsys.readouterr().out
    assert "gradient_clipping" in printed
    assert "parameters: " in printed
