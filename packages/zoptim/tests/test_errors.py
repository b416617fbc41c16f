from __future__ import annotations

import pytest

from zoptim.checks import check_option_names
from zoptim.errors import UnknownNameError, did_you_mean


def test_the_nearest_name_is_suggested_in_any_case() -> None:
    assert did_you_mean("adamW2", ["SGD", "AdamW"]) == " Did you mean 'AdamW'?"
    assert did_you_mean("WARMUPLR", ["WarmupLR"]) == " Did you mean 'WarmupLR'?"


def test_nothing_is_suggested_when_nothing_is_near() -> None:
    assert did_you_mean("zzz", ["SGD", "AdamW"]) == ""


def test_an_unknown_option_is_named_with_its_owner_and_the_allowed_ones() -> None:
    with pytest.raises(
        UnknownNameError, match=r"SGD has no option 'momentun'\. Did you mean 'momentum'\? It takes: lr,"
    ):
        check_option_names("SGD", {"lr": 1, "momentun": 2}, ["lr", "momentum"])


def test_known_options_pass() -> None:
    check_option_names("SGD", {"lr": 1}, ["lr", "momentum"])
