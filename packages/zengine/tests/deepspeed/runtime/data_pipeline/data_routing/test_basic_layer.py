"""Random-LTD for custom loops: the schedule of DeepSpeed 0.19.8, and a layer that skips tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zengine.deepspeed.runtime.data_pipeline.data_routing.basic_layer import RandomLayerTokenDrop
from zengine.deepspeed.runtime.data_pipeline.data_routing.helper import save_without_random_ltd
from zengine.deepspeed.runtime.data_pipeline.data_routing.scheduler import RandomLTDScheduler

GOLDEN = json.loads((Path(__file__).parents[3] / "golden/deepspeed_0_19_8.json").read_text())["ltd"]
CONFIG: dict[str, Any] = {
    "total_layer_num": 4,
    "random_ltd_layer_num": 2,
    "global_batch_size": 3,
    "micro_batch_size": 3,
    "model_mask_name": "mask",
    "model_type": "encoder",
    "hidden_state_order": "batch_seq_dim",
    "random_ltd_schedule": {
        "min_value": 16,
        "max_value": 64,
        "schedule_type": "fixed_linear",
        "schedule_config": {"require_steps": 10, "seq_per_step": 8},
    },
}


def test_the_schedule_is_that_of_deepspeed() -> None:
    schedule, found = RandomLTDScheduler(CONFIG), []
    for step in range(14):
        schedule.update_seq(step)
        found.append(schedule.get_current_seq())
    assert [*found, schedule.state_dict()] == GOLDEN
    other = RandomLTDScheduler(CONFIG)
    other.load_state_dict(schedule.state_dict())
    assert other.get_state()["consumed_layer_tokens"] == GOLDEN[-1]["consumed_layer_tokens"]
    assert other.get_total_layer_tokens(0) == GOLDEN[-1]["consumed_layer_tokens"]
    with pytest.raises(ValueError, match=r"layer_token_lr_schedule.enabled"):
        RandomLTDScheduler(CONFIG | {"layer_token_lr_schedule": {"enabled": True}})


class Layer(nn.Module):
    """Adds 1 to each token, and notes the tokens and masks that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        self.seen, self.mask = x, mask
        return x + self.step, "more"


@pytest.mark.parametrize("order", ["batch_seq_dim", "seq_batch_dim"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_other_tokens_pass_unchanged(order: str, kind: str) -> None:
    torch.manual_seed(0)
    config = CONFIG | {"hidden_state_order": order, "model_type": kind}
    schedule = RandomLTDScheduler(config)
    layers = [RandomLayerTokenDrop(Layer()) for _ in range(2)]
    for number, layer in enumerate(layers):
        layer.init_config(config, schedule, number)
    x = torch.arange(3 * 40.0).view(3, 40, 1).repeat(1, 1, 2)
    given = (x if order == "batch_seq_dim" else x.transpose(0, 1)).clone().requires_grad_()
    mask = torch.arange(40.0 * 40).view(1, 1, 40, 40)
    drawn = []
    for layer in layers:
        out, more = layer(given, mask=mask)
        assert more == "more"
        added = (out - given).detach() if order == "batch_seq_dim" else (out - given).detach().transpose(0, 1)
        assert added[..., 0].sum(dim=1).tolist() == [16.0] * 3
        kept = added[..., 0].nonzero()[:, 1].view(3, 16)
        inner: Any = layer.random_ltd_layer
        seen = inner.seen if order == "batch_seq_dim" else inner.seen.transpose(0, 1)
        assert torch.equal(seen, x.gather(1, kept[..., None].expand(-1, -1, 2)))
        want = mask[0, 0][kept[1]][:, kept[1]] if kind == "encoder" else mask[0, 0, :16, :16]
        assert torch.equal(inner.mask[min(1, len(inner.mask) - 1), 0], want)
        drawn.append(kept)
    assert not torch.equal(*drawn)
    out.sum().backward()
    assert torch.equal(given.grad, torch.ones_like(given))
    schedule.set_current_seq(64)
    assert torch.equal(layers[0](given, mask=mask)[0], given + 1)
    schedule.set_current_seq(16)
    assert torch.equal(layers[0].eval()(given, mask=mask)[0], given + 1)


def test_weights_keep_their_names_and_wrong_settings_are_named() -> None:
    model = nn.Sequential(RandomLayerTokenDrop(Layer()))
    assert list(save_without_random_ltd(model)) == ["0.step"]
    layer, schedule = RandomLayerTokenDrop(Layer()), RandomLTDScheduler(CONFIG)
    assert layer(torch.zeros(1, 2))[1] == "more"
    with pytest.raises(ValueError, match="hidden_state_order must be one of batch_seq_dim, seq_batch_dim"):
        layer.init_config(CONFIG | {"hidden_state_order": "dim"}, schedule, 0)
    with pytest.raises(ValueError, match="set model_mask_name"):
        layer.init_config(CONFIG | {"model_mask_name": None}, schedule, 0)
