"""Unknown values: shapes without arithmetic, and a question for every read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zengine.ordering.unknown import Undecided, UnknownValues


def asked(answer: Any = 7) -> tuple[UnknownValues, list[tuple[str, tuple[int, ...]]]]:
    questions: list[tuple[str, tuple[int, ...]]] = []

    def decide(tensor: Tensor, operation: str) -> Any:
        questions.append((operation, tuple(tensor.shape)))
        return answer

    return UnknownValues(decide, {}), questions


def test_a_model_trains_without_arithmetic_and_without_touching_memory() -> None:
    values, questions = asked()
    with values.running():
        model = nn.Sequential(nn.Linear(64, 1 << 20), nn.GELU(), nn.Linear(1 << 20, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        loss = model(torch.randn(4, 64)).square().mean()
        loss.backward()
        optimizer.step()
    weight = model[0].weight
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape
    assert values.is_unknown(loss)
    assert values.is_unknown(weight)
    assert not questions
    assert loss.dtype == torch.float32


def test_known_values_are_computed_and_views_are_real() -> None:
    values, questions = asked()
    with values.running():
        known = torch.arange(6).view(2, 3).sum(0)
        assert known.tolist() == [3, 5, 7]
        assert int(known.max()) == 7
        unknown = torch.randn(4, 4)
        view = unknown.view(-1)[4:]
        assert view.data_ptr() == unknown.data_ptr() + 16
        assert values.is_unknown(view)
        known.copy_(unknown[0, :3])
        assert values.is_unknown(known)
    assert not questions


@pytest.mark.parametrize(
    ("read", "operation"),
    [
        (lambda x: x.tolist(), "tolist"),
        (lambda x: x.numpy(), "numpy"),
        (lambda x: x[0].item(), "_local_scalar_dense"),
        (lambda x: bool(x.isfinite().all()), "_local_scalar_dense"),
        (lambda x: torch.equal(x, x + 1), "equal"),
        (lambda x: x.nonzero(), "nonzero"),
    ],
)
def test_a_read_is_a_question(read: Any, operation: str) -> None:
    values, questions = asked([7.0] * 3 if operation in ("tolist", "numpy") else 1)
    with values.running():
        read(torch.randn(3))
    assert [name for name, _ in questions] == [operation]


def test_shapes_that_depend_on_values_are_an_error() -> None:
    values, _ = asked()
    with values.running(), pytest.raises(Undecided, match="depends on values"):
        torch.randn(3)[torch.randn(3) > 0]
    assert torch.ones(2).tolist() == [1.0, 1.0], "tensors are as before"
