"""Strict types: what is refused, and the two conversions that lose nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest

from zengine.config.grammar.kinds import (
    DTYPE,
    LIST,
    MAPPING,
    POSITIVE,
    TEXT,
    TRUTH,
    Mismatch,
    ValueKind,
    choice,
    literal,
    null_or,
    number,
    whole,
)


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (TRUTH, False, False),
        (TRUTH, 1, True),
        (TRUTH, 0.0, False),
        (literal(TRUTH, "auto"), 1, True),
        (POSITIVE, 0, 1),
        (POSITIVE, 5e8, 500_000_000),
        (whole(1), 8, 8),
        (whole(), 5e8, 500_000_000),
        (number(), 3, 3.0),
        (number(0), 0, 0.0),
        (TEXT, "a", "a"),
        (choice("a", "b"), "b", "b"),
        (choice("WARN", fold=str.upper), "Warn", "WARN"),
        (DTYPE, "bf16", "bfloat16"),
        (DTYPE, "torch.float16", "float16"),
        (DTYPE, "float", "float32"),
        (DTYPE, "FP16", "float16"),
        (LIST, [1, 2], (1, 2)),
        (MAPPING, {"a": 1}, {"a": 1}),
        (literal(TRUTH, "auto"), "auto", "auto"),
        (literal(TRUTH, "auto"), True, True),
        (null_or(whole(1), 0), None, 0),
    ],
)
def test_a_value_of_the_kind_is_read_and_reading_again_changes_nothing(
    kind: ValueKind, value: Any, read: Any
) -> None:
    once = kind.read(value)
    assert once == read
    assert type(once) is type(read)
    if value is not None:
        assert kind.read(once) == once


@pytest.mark.parametrize(
    ("kind", "value", "reason", "suggestion"),
    [
        (TRUTH, "false", "needs true or false, got text", "Write false without quotes."),
        (TRUTH, 2, "needs true or false, got a number", ""),
        (TRUTH, "1", "needs true or false, got text", "Write true without quotes."),
        (POSITIVE, -1, "must be >= 0", ""),
        (whole(0), 1e308, "must be <= 9223372036854775807", ""),
        (whole(0), 10**400, "must be <= 9223372036854775807", ""),
        (number(), 10**400, "must be finite", ""),
        (number(), math.nan, "must be finite", ""),
        (TRUTH, None, "needs true or false, got null", ""),
        (TRUTH, {}, "needs true or false, got an object {...}", ""),
        (whole(1), "2", "needs a whole number >= 1, got text", "Write 2 without quotes."),
        (whole(1), True, "needs a whole number >= 1, got true/false", ""),
        (whole(1), 2.5, "needs a whole number >= 1", ""),
        (whole(1), 0, "must be >= 1", ""),
        (whole(0, 126), 127, "must be <= 126", ""),
        (whole(0), math.inf, "needs a whole number >= 0", ""),
        (number(), "1e-3", "needs a number, got text", "Write 1e-3 without quotes."),
        (number(), False, "needs a number, got true/false", ""),
        (number(), math.inf, "must be finite", ""),
        (number(above=0), 0, "must be > 0", ""),
        (number(0), -1.5, "must be >= 0", ""),
        (TEXT, 3, "needs text, got a number", ""),
        (choice("mean", "sum"), "avg", 'must be one of "mean", "sum"', ""),
        (DTYPE, "fp8", 'must be one of "fp32", "fp16", "bf16", "fp64"', ""),
        (LIST, "a", "needs a list [...], got text", ""),
        (MAPPING, [], "needs an object {...}, got a list [...]", ""),
        (literal(TRUTH, "auto"), 2, 'needs true, false or "auto", got a number', ""),
        (whole(), {1}, "needs a whole number >= 0, got a Python set", ""),
    ],
)
def test_another_value_is_refused_with_the_reason(kind: ValueKind, value: Any, reason: str, suggestion: str) -> None:
    with pytest.raises(Mismatch) as caught:
        kind.read(value)
    assert (caught.value.reason, caught.value.suggestion) == (reason, suggestion)


@pytest.mark.parametrize("kind", [TRUTH, whole(1), number(), TEXT, choice("a"), DTYPE, LIST, MAPPING])
def test_auto_is_sent_back_to_who_wrote_it(kind: ValueKind) -> None:
    with pytest.raises(Mismatch) as caught:
        kind.read("auto")
    assert caught.value.reason.startswith('"auto" must be resolved by the integration that wrote it; this key needs ')
