"""Weights, gradients and states of one parameter, with DeepSpeed's argument names."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed import utils
from zengine.deepspeed.absent import NotAvailable


def check_stage(stage: int) -> bool:
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=net, config=config)[0]
    engine.backward(engine(torch.ones(1, 3)).sum())
    utils.safe_update_full_grad_vectorized([net.weight, net.bias], lambda grad, param: grad * 2)
    assert torch.equal(utils.safe_get_full_grad(net.weight), torch.full((2, 3), 2.0))
    engine.step()
    average = utils.safe_get_full_optimizer_state(net.weight, optim_state_key="exp_avg")
    assert torch.allclose(average, torch.full((2, 3), 0.2))
    utils.safe_set_full_optimizer_state(net.weight, torch.ones(2, 3), optim_state_key="exp_avg")
    local = utils.safe_get_local_optimizer_state(net.weight, optim_state_key="exp_avg")
    assert bool((local == 1).all())
    utils.safe_set_local_optimizer_state(net.weight, local * 3, optim_state_key="exp_avg")
    assert torch.equal(utils.safe_get_full_optimizer_state(net.weight, "exp_avg"), torch.full((2, 3), 3.0))
    utils.set_full_hp_param(net.weight, torch.full((2, 3), 4.0), "exp_avg")
    assert torch.equal(utils.get_full_hp_param(net.weight, "exp_avg"), torch.full((2, 3), 4.0))
    utils.set_full_hp_param(net.weight, torch.full((2, 3), 5.0))
    assert torch.equal(utils.get_full_hp_param(net.weight), torch.full((2, 3), 5.0))
    assert not hasattr(net.weight, "_hp_mapping")
    with pytest.raises(NotAvailable, match="safe_get_local_fp32_param"):
        utils.link_hp_params([net.weight])
    return bool((utils.safe_get_full_fp32_param(net.weight) == 5).all())


def check_stages() -> list[bool]:
    return [check_stage(stage) for stage in (1, 2, 3)]


def test_state_can_be_read_and_set_at_every_stage():
    assert run_ranks(check_stages, 2) == [[True] * 3] * 2
