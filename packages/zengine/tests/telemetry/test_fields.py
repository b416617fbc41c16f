"""Values of the expected type, or an error."""

from __future__ import annotations

import math

import pytest

from zengine.telemetry.fields import amount, text, whole

ODD = [None, True, -1, [], {}, 2**63, math.nan, math.inf, -0.5]


@pytest.mark.parametrize("value", ODD)
def test_what_is_not_of_the_type_is_refused(value: object) -> None:
    for read in (text, whole, amount):
        with pytest.raises(ValueError, match="is no"):
            read(value)


def test_what_is_stays_as_it_is() -> None:
    assert (text(""), whole(3), amount(3), amount(0.5)) == ("", 3, 3.0, 0.5)
    for read, value in ((text, 1), (whole, 1.0), (whole, "1"), (amount, "1")):
        with pytest.raises(ValueError, match="is no"):
            read(value)
