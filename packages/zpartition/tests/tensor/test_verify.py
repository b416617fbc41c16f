"""Wrong plans are detected by running them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zpartition.tensor import Column, Row, Rule, TensorPlan, Uncovered, verify
from zpartition.testing.tensor_models import PLAN, WIDTH, Block, Blocked, Language


def _messages() -> list[str]:
    torch.manual_seed(0)
    language, tokens = Language(), torch.zeros(1, 4, dtype=torch.long)
    before = [param.detach().clone() for param in language.parameters()]
    verify(language, PLAN, None, tokens)
    assert all(torch.equal(a, b) for a, b in zip(before, language.parameters()))
    assert all(param.grad is None for param in language.parameters())
    block, x = Block(Blocked()), torch.randn(1, 3, WIDTH)
    contiguous = [Rule("attention.qkv", Column()), Rule("attention.proj", Row())]  # q, k and v are blocks
    found = []
    for plan, model, given in [
        (contiguous, block, x),
        ([Rule("0", Column())], nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 2)), torch.zeros(1, 4)),
        (
            [Rule("0", Column()), Rule("2", Row())],
            nn.Sequential(nn.Linear(4, 6), nn.Softmax(-1), nn.Linear(6, 2)),
            x[..., :4],
        ),
    ]:
        with pytest.raises(ValueError, match="does not fit") as raised:
            verify(model, TensorPlan(plan, Uncovered.KEEP), None, given)
        found.append(str(raised.value))
    return found


def test_plans_that_fail_or_give_wrong_values_raise_on_all_ranks() -> None:
    first, second = run_ranks(_messages, 2)
    assert first == second
    assert "does not fit Block: output 0 differs by" in first[0]
    assert "does not fit Sequential: a rank's part fails with RuntimeError: mat1 and mat2 shapes" in first[1]
    assert "output 0 differs by" in first[2]
    assert "Column(gathers=True) and Row(takes_part=True)" in first[2]
