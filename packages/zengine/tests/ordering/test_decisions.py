"""Decisions: the places of the table exist, and answers differ between ranks only where they may."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
import torch

from zengine.ordering.decisions import DECISIONS, Oracle, Script
from zengine.ordering.unknown import Undecided


@pytest.mark.parametrize("place", DECISIONS)
def test_a_place_is_a_function_of_the_packages(place: str) -> None:
    module, function = place.split(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def answers(rank: int) -> list[object]:
    table = {
        f"{__name__}:answers": lambda reading: (reading.step, reading.number, reading.agreed().random()),
    }
    oracle = Oracle(table, rank, 8, Script())
    found = [oracle.decide(torch.zeros(2), "tolist")]
    oracle.step = 3
    return [*found, oracle.decide(torch.zeros(2), "tolist")]


def own(rank: int) -> object:
    return Oracle({f"{__name__}:own": lambda reading: reading.own().random()}, rank, 8, Script()).decide(
        torch.zeros(2), "numpy"
    )


def test_ranks_agree_at_each_reading_or_have_answers_of_their_own() -> None:
    first, second = answers(0)
    assert answers(5) == [first, second]
    assert first != second
    assert own(0) == own(0) != own(5)


def test_a_place_without_an_oracle_is_an_error_with_its_line() -> None:
    with pytest.raises(Undecided, match=r"test_decisions.py:\d+ reads a value .*tolist of \(2,\) torch.float32"):
        Oracle({}, 0, 8, Script()).decide(torch.zeros(2), "tolist")
