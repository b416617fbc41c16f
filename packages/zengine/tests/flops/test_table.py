"""Profile as text."""

from __future__ import annotations

import pytest

from zengine.flops.profile import FlopsProfile, ModuleCost, format_amount, format_profile

PROFILE = FlopsProfile(
    modules=(
        ModuleCost(path="", kind="GPT", params=1_500, flops=4_000_000, ms=2.0, calls=1),
        ModuleCost(path="body", kind="Body", params=1_000, flops=3_000_000, ms=1.5, calls=1),
        ModuleCost(path="body.act", kind="GELU", params=0, flops=0, ms=0.25, calls=1),
        ModuleCost(path="head", kind="Linear", params=500, flops=1_000_000, ms=0.5, calls=1),
    ),
    operations={"addmm": 3_000_000, "mm": 1_000_000},
    backward_flops=8_000_000,
    recompute_factor=1.0,
)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (999, "999"), (1_234_567, "1.235 M"), (2.5e15, "2.5 P"), (0.5, "0.5")]
)
def test_numbers_have_a_prefix(value: float, text: str) -> None:
    assert format_amount(value) == text


def test_a_unit_follows_the_prefix() -> None:
    assert format_amount(3e9, "FLOPs") == "3 GFLOPs"
    assert format_amount(3, "FLOPs") == "3 FLOPs"


def test_the_summary_says_what_was_counted_and_what_the_formula_says() -> None:
    text = format_profile(PROFILE, step=7, detailed=False)
    for part in ("GPT after step 7", "1.5 k", "4 MFLOPs = 2 MMACs", "2.00 ms, 2 GFLOPS", "8 MFLOPs, 2.00 forwards"):
        assert part in text, part
    assert "16 MFLOPs = 4 forwards" in text
    assert "75.0%                    of the forward's FLOPs in addmm" in text
    assert "depth 1   FLOPs: Body 3 M   params: Body 1 k   ms: Body 1.50" in text
    assert "GELU 0.25" in text


def test_every_module_has_a_line_down_to_the_depth() -> None:
    def lines(depth: int) -> list[list[str]]:
        return [line.split() for line in format_profile(PROFILE, step=1, module_depth=depth).splitlines()]

    assert ["act", "GELU", "0", "0", "0", "0.0%", "0.25", "12.5%", "-"] in lines(-1)
    assert ["head", "Linear", "500", "500", "k", "1", "M", "25.0%", "0.50", "25.0%", "2", "G"] in lines(1)
    assert not [line for line in lines(1) if line[:1] == ["act"]]


def test_more_classes_are_named_when_asked() -> None:
    assert "FLOPs: Body 3 M, Linear 1 M" in format_profile(PROFILE, step=1, top_modules=2)


def test_without_time_there_is_none() -> None:
    still = FlopsProfile(modules=(ModuleCost(path="", kind="GPT", params=1, flops=2),))
    text = format_profile(still, step=1)
    assert "latency" not in text
    assert "backward" not in text
    assert text.splitlines()[-1].split()[-3:] == ["-", "-", "-"]
