"""The law of theta as DeepSpeed's class."""

from __future__ import annotations

import pytest

from zengine.deepspeed.runtime.progressive_layer_drop import ProgressiveLayerDrop

# theta 0.5, gamma 0.001: DeepSpeed 0.16.9
GOLDEN = {0: 1.0, 1: 0.9995, 100: 0.952419, 1000: 0.683940, 5000: 0.503369, 10000: 0.500023}


def test_theta_is_that_of_deepspeed() -> None:
    drop = ProgressiveLayerDrop()
    assert drop.get_state() == {"progressive_layer_drop": True, "pld_theta": 1.0}
    for step, theta in GOLDEN.items():
        drop.update_state(step)
        assert drop.get_theta() == pytest.approx(theta, abs=1e-6)
    assert drop.get_state()["pld_theta"] == drop.current_theta
