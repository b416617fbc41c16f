"""Command-line arguments of schedules."""

from __future__ import annotations

import argparse

import pytest

from zengine.deepspeed.runtime.lr_schedules import add_tuning_arguments


def test_a_parser_takes_the_name_of_a_schedule():
    parser = add_tuning_arguments(argparse.ArgumentParser())
    found = parser.parse_args(["--lr_schedule", "OneCycle", "--warmup_num_steps", "5"])
    assert (found.lr_schedule, found.warmup_num_steps) == ("OneCycle", 5)
    assert parser.parse_args([]).lr_schedule is None
    with pytest.raises(SystemExit):
        parser.parse_args(["--lr_schedule", "Cosine"])
