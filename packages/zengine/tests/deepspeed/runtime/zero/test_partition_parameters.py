"""zero.Init and zero.GatheredParameters, with DeepSpeed's arguments."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zengine import deepspeed

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def check_init() -> bool:
    plain = model().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG, remote_device="cpu", pin_memory=True):
        net = model()
    assert net[0].weight.untyped_storage().nbytes() == 4
    engine = deepspeed.initialize(model=net, config=CONFIG)[0]
    with deepspeed.zero.GatheredParameters(net.parameters()):
        same = all(torch.equal(param, plain[name]) for name, param in net.named_parameters())
    with deepspeed.zero.GatheredParameters([net[0].weight, None], modifier_rank=1):
        if zcomm.group_rank() == 1:
            net[0].weight.data.fill_(3.0)
    with deepspeed.zero.GatheredParameters(net[0].weight):
        edited = bool((net[0].weight == 3).all())
    engine.backward(engine(torch.ones(1, 3)).sum())
    assert engine.step()
    engine.destroy()
    return same and edited


def test_a_model_built_inside_init_is_the_plain_one_and_edits_count_on_all_ranks():
    assert run_ranks(check_init, 2) == [True, True]


def test_init_that_is_off_or_has_a_module_does_nothing_and_a_dtype_is_that_of_new_tensors():
    with deepspeed.zero.Init(enabled=False):
        assert model()[0].weight.device.type == "cpu"
    with deepspeed.zero.Init(module=model()):
        assert model()[0].weight.device.type == "cpu"
    with deepspeed.zero.Init(dtype=torch.bfloat16):
        assert model()[0].weight.dtype == torch.bfloat16
    assert torch.ones(1).dtype == torch.float32


def test_parameters_that_nobody_split_are_left_alone():
    net = model()
    with deepspeed.zero.GatheredParameters(net.parameters(), modifier_rank=0, fwd_module=net):
        net[0].weight.data.zero_()
    with deepspeed.zero.GatheredParameters(net.parameters(), enabled=False):
        pass
    assert not net[0].weight.any()


def test_registering_is_accepted_for_parameters():
    net = model()
    deepspeed.zero.register_external_parameter(net, net[0].weight)
    deepspeed.zero.unregister_external_parameter(net, net[0].weight)
    with pytest.raises(RuntimeError, match=r"takes a torch\.nn\.Parameter, not Tensor"):
        deepspeed.zero.register_external_parameter(net, torch.ones(1))


def test_transformers_may_replace_the_constructor_wrapper():
    from zengine.deepspeed.runtime.zero import partition_parameters as pp

    assert pp.zero_wrapper_for_fp_tensor_constructor(torch.arange, torch.float16) is torch.arange
    assert pp._orig_torch_arange is torch.arange
    assert callable(pp.get_accelerator)
    assert {status.name for status in pp.ZeroParamStatus} == {"AVAILABLE", "NOT_AVAILABLE", "INFLIGHT"}


def test_a_fill_of_a_weight_at_rest_has_no_effect_until_initialize() -> None:
    """Transformers initializes again on the ranks that have not edited; DeepSpeed's weights are empty then."""
    plain = model().state_dict()
    with deepspeed.zero.Init(config_dict_or_path=CONFIG):
        net = model()
    weight = net[0].weight
    assert nn.init.normal_(weight) is weight
    nn.init.zeros_(tensor=net[0].bias)
    with torch.no_grad():
        weight.mul_(2).fill_(3.0)
        weight[1].zero_()
    weight.data.uniform_()
    with pytest.raises(RuntimeError), torch.no_grad():
        weight.copy_(torch.ones(4, 3))  # values would be lost
    with deepspeed.zero.GatheredParameters(net.parameters()):
        assert all(torch.equal(param, plain[name]) for name, param in net.named_parameters())
        nn.init.ones_(weight)
    engine = deepspeed.initialize(model=net, config=CONFIG)[0]
    with deepspeed.zero.GatheredParameters(net.parameters()):
        assert bool((weight == 1).all())
        assert torch.equal(net[2].weight, plain["2.weight"])
    assert type(weight).__torch_function__ == nn.Parameter.__torch_function__  # no work in the loop
    assert not torch.overrides.has_torch_function((weight,))
    engine.destroy()


def average_weights() -> tuple[list[torch.Tensor], ...]:
    """Train 3 steps; return moving averages: of an engine's, of whole copies, and of shards that are written back."""
    net, averaged = model(), model()
    engine = deepspeed.initialize(model=net, config=CONFIG)[0]
    frozen = {key: value for key, value in CONFIG.items() if key != "optimizer"}
    of_engine = deepspeed.initialize(model=averaged, config=frozen)[0]
    with deepspeed.zero.GatheredParameters(net.parameters()):
        copies = [param.detach().clone() for param in net.parameters()]
    shards = [param.ds_tensor.clone() for param in net.parameters()]
    for step in range(3):
        engine.backward((engine(torch.full((1, 3), 1.0 + step)) - zcomm.group_rank()).square().sum())
        engine.step()
        with torch.no_grad():
            for param, average in zip(net.parameters(), averaged.parameters()):  # DeepSpeed-Chat's
                with deepspeed.zero.GatheredParameters([param, average]):
                    average.data.copy_(torch.lerp(average.data, param.data, 0.1))
            with deepspeed.zero.GatheredParameters(net.parameters()):
                for copy, param in zip(copies, net.parameters()):
                    copy.lerp_(param, 0.1)
            for shard, param in zip(shards, net.parameters()):
                shard.lerp_(param.ds_tensor, 0.1)
    engine.empty_partition_cache()  # weights that are still whole do not show what is written into the shards
    for shard, param in zip(shards, net.parameters()):
        param.ds_tensor.data.copy_(shard)
    found = []
    for each in (net, averaged):
        with deepspeed.zero.GatheredParameters(each.parameters()):
            found.append([param.detach().clone() for param in each.parameters()])
    engine.destroy()
    of_engine.destroy()
    return (*found, copies)


def test_moving_averages_of_weights_are_those_of_plain_torch() -> None:
    net, average = model(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(2):
            ((net(torch.full((1, 3), 1.0 + step)) - rank).square().sum() / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for mean, param in zip(average.parameters(), net.parameters()):
                mean.lerp_(param, 0.1)
    for found in run_ranks(average_weights, 2):
        for averages in found:
            for mean, expected in zip(averages, average.parameters(), strict=True):
                torch.testing.assert_close(mean, expected.detach())
