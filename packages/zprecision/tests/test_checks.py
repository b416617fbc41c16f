"""Checks: the numbers and messages that the other test files do not reach."""

from __future__ import annotations

import math

import pytest
import torch

from zprecision import DynamicScaling, Precision
from zprecision.checks import as_float32, is_number


def test_rounding_to_float32_is_that_of_torch() -> None:
    for value in (0.1, 1.0, 65504.3, 1e-46, 3.4028235e38, 1e39):
        assert as_float32(value) == torch.tensor(value, dtype=torch.float64).float().item()
    assert as_float32(1e39) == math.inf


def test_a_bool_is_not_a_number() -> None:
    assert [is_number(value) for value in (1, 2.5, True, "1", None, math.nan)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]


def test_a_message_offers_the_default_only_where_there_is_a_plain_one() -> None:
    with pytest.raises(ValueError, match=r"got a int; the default is 1000$"):
        DynamicScaling(window=-4)
    with pytest.raises(ValueError, match=r"got a dtype$"):
        Precision(master=torch.int8)
