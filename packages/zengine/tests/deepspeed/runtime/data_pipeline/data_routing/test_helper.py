"""Random-LTD by DeepSpeed's calls: the model is not rewritten."""

from __future__ import annotations

from torch import nn

from zengine.deepspeed.runtime.data_pipeline.data_routing.helper import convert_to_random_ltd, save_without_random_ltd


def test_a_model_stays_what_it_is() -> None:
    model = nn.Linear(1, 1)
    assert convert_to_random_ltd(model, nn.Linear) is model
    assert list(save_without_random_ltd(model)) == ["weight", "bias"]
