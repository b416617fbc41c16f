"""Kinds of the sections of precision (their keys: test_known.py)."""

from __future__ import annotations

import pytest

from zengine.config import load
from zengine.config.grammar.kinds import Mismatch
from zengine.config.keys.precision import HALF, NAMES, SAFE_MODULES, Autocast


def test_a_half_precision_is_not_float32() -> None:
    assert (HALF.read("bf16"), HALF.read("torch.float16")) == ("bfloat16", "float16")
    for value in ("fp32", "fp8", 16):
        with pytest.raises(Mismatch):
            HALF.read(value)


def test_names_are_a_list_of_text() -> None:
    assert NAMES.read(["a", "b"]) == ("a", "b")
    for value in ("a", [1], None):
        with pytest.raises(Mismatch):
            NAMES.read(value)


def test_null_is_the_default_as_in_deepspeed() -> None:
    section = {"enabled": True, "dtype": None, "lower_precision_safe_modules": None}
    assert load({"torch_autocast": section}).settings.torch_autocast == Autocast(enabled=True)
    assert Autocast().lower_precision_safe_modules == SAFE_MODULES
