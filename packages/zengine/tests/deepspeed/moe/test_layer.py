"""The layer by DeepSpeed's name."""

from __future__ import annotations

import zengine.deepspeed as deepspeed
import zpartition.experts


def test_the_layer_is_zpartitions() -> None:
    assert deepspeed.moe.layer.MoE is zpartition.experts.MoE
