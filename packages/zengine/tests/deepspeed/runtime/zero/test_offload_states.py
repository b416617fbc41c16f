"""get_state_devices: where states are before, during and after `offload_states`."""

from __future__ import annotations

import torch
from torch import nn

from zengine import deepspeed
from zengine.deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from zengine.deepspeed.runtime.zero.offload_states import get_state_devices

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def test_devices_of_states(tmp_path):
    engine = deepspeed.initialize(model=nn.Linear(3, 2), config=CONFIG)[0]
    assert get_state_devices(engine, OffloadStateTypeEnum.optim_states) == set()
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert get_state_devices(engine, "lp_grads") == {engine.device}
    engine.step()
    states = ("optim_states", "hp_params", "lp_params", "contiguous_grad_buffer")
    before = deepspeed.utils.safe_get_full_fp32_param(engine.module.weight)
    assert [get_state_devices(engine, each) for each in states] == [{engine.device}] * 4
    engine.offload_states()
    host = {torch.device("cpu")}
    assert [get_state_devices(engine, each) for each in states] == [host, host, host, set()]
    engine.reload_states()
    engine.offload_states(device="nvme", nvme_path=str(tmp_path), include=["hp_params"])
    assert [get_state_devices(engine, each) for each in ("optim_states", "hp_params")] == [{engine.device}, set()]
    engine.reload_states()
    assert torch.equal(deepspeed.utils.safe_get_full_fp32_param(engine.module.weight), before)
