"""Values of the expected type, or an error."""

from __future__ import annotations

import math

import pytest

from zengine.telemetry.json_values import read_amount, read_count, read_text

ODD = [None, True, -1, [], {}, 2**63, math.nan, math.inf, -0.5]


@pytest.mark.parametrize("value", ODD)
def test_what_is_not_of_the_type_is_refused(value: object) -> None:
    for read in (read_text, read_count, read_amount):
        with pytest.raises(ValueError, match="is no"):
            read(value)


def test_what_is_stays_as_it_is() -> None:
    assert (read_text(""), read_count(3), read_amount(3), read_amount(0.5)) == ("", 3, 3.0, 0.5)
    for read, value in ((read_text, 1), (read_count, 1.0), (read_count, "1"), (read_amount, "1")):
        with pytest.raises(ValueError, match="is no"):
            read(value)
