"""The settings of the sections that look into a run."""

from __future__ import annotations

import pytest

from zengine.config import ConfigError, load


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"profiler": {"start_step": 0}}, "must be >= 1"),
        ({"profiler": {"ranks": [-1]}}, "must be >= 0"),
        ({"profiler": {"ranks": 0}}, "a list"),
        ({"profiler": {"end_step": 3}}, "unknown key"),
        ({"flops_profiler": {"module_depth": -2}}, "must be >= -1"),
        ({"flops_profiler": {"profile_stop": 1}}, "profile_step"),
    ],
)
def test_mistakes_are_told(section, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load({"train_batch_size": 1, **section})
