"""A report is truthy if the weights changed, and formats as one line."""

from __future__ import annotations

import attrs
import pytest

from zengine import NonFiniteGradient, StepReport
from zengine.step_report import UNKNOWN_RANK

APPLIED = StepReport(
    applied=True,
    reason="",
    step=3,
    applied_steps=2,
    skipped_steps=1,
    samples=24,
    loss=0.125,
    grad_norm=2.5,
    loss_scale=1.0,
    lr=(0.1, 0.01),
)


def test_an_applied_step_is_true_and_says_what_it_did():
    assert APPLIED
    assert str(APPLIED) == "step 3 (2 applied, 1 skipped): loss 0.125, gradient norm 2.5, lr 0.1, 0.01"
    assert str(attrs.evolve(APPLIED, loss_scale=1024.0)).endswith(", loss scale 1024")


def test_a_skipped_step_is_false_and_says_why():
    found = NonFiniteGradient(parameter="w", kind="nan")
    report = attrs.evolve(APPLIED, applied=False, reason="gradient of w is nan: step skipped", nonfinite=found)
    assert not report
    assert str(report) == "step 3 (2 applied, 1 skipped): gradient of w is nan: step skipped"
    assert report.nonfinite.rank == UNKNOWN_RANK


def test_the_old_name_of_nonfinite_raises_an_error_with_the_new_one():
    with pytest.raises(
        AttributeError, match=r"StepReport\.culprit was renamed in 0\.3\.0; use StepReport\.nonfinite"
    ):
        APPLIED.culprit  # noqa: B018
    assert not hasattr(APPLIED, "culprit")
