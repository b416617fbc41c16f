"""`optimizer.parameter_offload`, generation with gathered weights, and suspended Init blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.runtime.zero import partition_parameters, unwrap_model_for_generation
from zengine.deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload


def make(stage: int) -> deepspeed.DeepSpeedEngine:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
    }
    engine: deepspeed.DeepSpeedEngine = deepspeed.initialize(model=nn.Linear(4, 2), config=config)[0]
    return engine


def check_generation() -> None:
    plain = nn.Linear(4, 2)
    plain.load_state_dict(make(0).module.state_dict())
    engine = make(3)
    offload = engine.optimizer.parameter_offload
    assert isinstance(offload, DeepSpeedZeRoOffload)
    assert offload.persistent_parameters == [engine.module.bias]
    assert len(offload.forward_hooks) == len(offload.backward_hooks) == 1
    x = torch.ones(1, 4)
    with unwrap_model_for_generation(engine) as model:
        assert not offload.forward_hooks
        assert torch.equal(model.module.weight, plain.weight)
        with torch.no_grad():
            assert torch.equal(model.module(x), plain(x))
    assert len(offload.forward_hooks) == 1
    with pytest.raises(KeyError), unwrap_model_for_generation(engine):
        raise KeyError
    assert len(offload.forward_hooks) == 1
    engine.backward(engine(x).sum())
    assert engine.step()
    offload.partition_all_parameters()
    assert not zpartition.is_gathered(engine.module.weight)
    engine.destroy()


def test_weights_are_gathered_once_for_a_generation_and_training_goes_on():
    run_ranks(check_generation, 2)


def test_below_stage_3_the_block_gives_the_engine_itself():
    engine = make(1)
    with unwrap_model_for_generation(engine) as model:
        assert model is engine
    engine.destroy()


def test_init_is_suspended_until_it_is_restored():
    with deepspeed.zero.Init():
        partition_parameters.shutdown_init_context()
        partition_parameters.shutdown_init_context()
        real = nn.Linear(2, 2)
        partition_parameters.restore_init_context()
        deferred = nn.Linear(2, 2)
    partition_parameters.restore_init_context()
    assert not hasattr(real.weight, "ds_id")
    assert real.weight.untyped_storage().nbytes() == 16
    assert partition_parameters.is_zero_param(deferred.weight)


def test_a_dtype_is_ignored_if_it_is_not_among_the_overrides():
    only_device = [deepspeed.zero.DeepSpeedTensorOverride.device]
    with deepspeed.zero.Init(dtype=torch.bfloat16, tensor_overrides=only_device):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        assert nn.Linear(2, 2).weight.dtype == torch.bfloat16
