"""Optimizer options with DeepSpeed's meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zengine
from zengine.config import Facts, load, resolve

DECAY = {"lr": 0.1, "weight_decay": 0.5}


def trained(**optimizer: Any) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Weights after three steps, and the notices."""
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 3)
    engine, *_ = zengine.initialize(model=model, config={"train_batch_size": 2, "optimizer": optimizer})
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    weights, notices = model.weight.detach().clone(), engine.plan.notices
    engine.close()
    return weights, notices


def test_adamw_decouples_its_decay_with_and_without_adam_w_mode_and_says_so_once() -> None:
    plain, quiet = trained(type="AdamW", params=DECAY)
    forced, notices = trained(type="AdamW", params={**DECAY, "adam_w_mode": False})
    coupled, also_quiet = trained(type="Adam", params={**DECAY, "adam_w_mode": False})
    assert torch.equal(forced, plain)
    assert not torch.allclose(coupled, plain)
    assert [notice for notice in notices if "adam_w_mode" in notice] == [
        'dict: optimizer.params.adam_w_mode = false has no effect here: "AdamW" decouples the weight decay, as in '
        'DeepSpeed. For an L2 penalty write "type": "Adam"'
    ]
    assert not any("adam_w_mode" in notice for notice in (*quiet, *also_quiet))


@pytest.mark.parametrize("mode", [True, None])
def test_nothing_is_said_about_an_adam_w_mode_that_is_on(mode: bool | None) -> None:
    params = {} if mode is None else {"adam_w_mode": mode}
    config = load({"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": params}})
    assert not any("adam_w_mode" in notice for notice in resolve(config, Facts(world_size=1, replicas=1)).notices)
