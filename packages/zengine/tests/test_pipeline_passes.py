"""Forward and backward of a stage with the parts of an engine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zengine.pipeline_engine import EnginePasses


class Log:
    """Parts that tell what they were asked."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    @contextlib.contextmanager
    def noted(self, *what: Any, **options: Any) -> Iterator[None]:
        self.told.append((*what, *options.items()))
        yield
        self.told.append("end")

    def forward(self, module: Any, args: Any, kwargs: Any) -> str:
        self.told.append((module, args, kwargs))
        return "output"


def passes_of(log: Log) -> EnginePasses:
    parts: Any = SimpleNamespace(
        telemetry=SimpleNamespace(span=log.noted),
        runner=log,
        partition=SimpleNamespace(micro_step=log.noted),
        scaler=SimpleNamespace(scale=lambda loss: 8 * loss),
    )
    return EnginePasses(parts)


def test_a_stage_runs_as_the_runner_runs_modules() -> None:
    log, module, around = Log(), object(), object()
    assert passes_of(log).forward(module, 1, "value", around) == "output"  # type: ignore[arg-type]
    assert log.told == [("forward",), (module, ("value",), {"stage": 1, "around": around}), "end"]


def test_a_backward_is_a_round_and_the_first_one_is_announced() -> None:
    log = Log()
    passes = passes_of(log)
    passes.before_backward = lambda: log.told.append("first")
    for is_last in (False, True):
        with passes.backward(is_last=is_last):
            log.told.append("backward runs")
    one = [("backward",), (("is_last", False),), "backward runs", "end", "end"]
    assert log.told == ["first", *one, ("backward",), (("is_last", True),), "backward runs", "end", "end"]


def test_losses_are_divided_and_scaled_or_refused() -> None:
    passes = passes_of(Log())
    assert passes.share(torch.tensor(2.0, requires_grad=True), 4).item() == 4.0
    with pytest.raises(ValueError, match="without a graph"):
        passes.share(torch.tensor(2.0), 4)


def test_the_loss_is_computed_where_forward_is_in_autocast_or_not() -> None:
    passes = passes_of(Log())
    output, labels = torch.randn(2, 3, dtype=torch.bfloat16), torch.tensor([0, 1])
    assert passes.loss(torch.nn.functional.cross_entropy, output, labels).dtype == torch.bfloat16
    passes.autocast = lambda: torch.autocast("cpu", dtype=torch.bfloat16)
    assert passes.loss(torch.nn.functional.cross_entropy, output, labels).dtype == torch.float32
