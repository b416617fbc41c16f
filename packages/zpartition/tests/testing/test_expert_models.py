"""The expert model has the properties that tests rely on."""

from __future__ import annotations

from typing import Any

import torch

from zpartition.testing.expert_models import MoELanguageModel, batches


def test_the_third_layer_leaves_experts_without_tokens_and_the_first_drops_some() -> None:
    model: Any = MoELanguageModel()
    seen: dict[int, torch.Tensor] = {}
    for index, block in enumerate(model.blocks):
        block.moe.gate.register_forward_hook(lambda _m, _i, out, index=index: seen.__setitem__(index, out))
    model(batches(2, 1)[0, 0, 0])
    assert int((seen[2].counts == 0).sum()) == 3
    assert not bool(seen[0].kept.all())
