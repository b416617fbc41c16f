"""initialize() does work in proportion to the number of tensors: calls of functions are counted, not seconds."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from torch import nn

import zengine


def count_calls(num_layers: int, stage: int) -> int:
    """Return the Python functions called, and generators resumed, while a model of `num_layers` is initialized."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(num_layers)))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {"stage": stage},
    }
    calls = 0

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        zengine.initialize(model=model, config=config)[0].close()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("stage", [0, 3])
def test_the_calls_grow_with_the_tensors_and_not_with_their_square(stage: int) -> None:
    count_calls(1, stage)  # modules are imported at first use
    small, middle, large = (count_calls(num_layers, stage) for num_layers in (20, 120, 320))
    assert large - middle <= 2 * (middle - small) * 1.1  # the slope of 100 more layers, twice
