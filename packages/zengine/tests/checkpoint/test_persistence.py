"""Members of the engine that save and load runs and weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks


def _engine() -> zengine.Engine:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    return zengine.initialize(model=nn.Linear(3, 1), config=config)[0]


def test_a_state_dict_has_the_names_of_the_module_and_loads_into_another_engine() -> None:
    first, second = _engine(), _engine()
    assert list(first.state_dict()) == list(first.module.state_dict()) == ["weight", "bias"]
    second.load_state_dict(first.state_dict())
    for name, value in second.state_dict().items():
        assert torch.equal(value, first.state_dict()[name])


def test_a_checkpoint_comes_back_with_its_folder_and_client_state(tmp_path) -> None:
    first, second = _engine(), _engine()
    folder = first.save_checkpoint(tmp_path, client_state={"epoch": 3})
    assert second.load_checkpoint(tmp_path) == (folder, {"epoch": 3})
    assert torch.equal(second.module.weight, first.module.weight)


def test_frozen_weights_may_be_left_out_and_a_load_keeps_those_that_are_there(tmp_path) -> None:
    def with_frozen_base(value: float) -> zengine.Engine:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
        model[0].requires_grad_(False).weight.fill_(value)
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
        return zengine.initialize(model=model, config=config)[0]

    first, second = with_frozen_base(1.0), with_frozen_base(2.0)
    first.save_checkpoint(tmp_path, tag="part", exclude_frozen_parameters=True)
    second.load_checkpoint(tmp_path, tag="part")
    assert torch.equal(second.module[1].weight, first.module[1].weight)
    assert second.module[0].weight.eq(2.0).all()
    first.save_checkpoint(tmp_path, tag="whole")
    second.load_checkpoint(tmp_path, tag="whole")
    assert second.module[0].weight.eq(1.0).all()


def test_a_function_that_wants_a_whole_state_dict_is_told_where_to_get_one(tmp_path) -> None:
    with pytest.raises(ValueError, match=r"Read it with zckpt\.load"):
        _engine().load_checkpoint(tmp_path, custom_load_fn=lambda src, dst: None)


def _masters_get_all_digits() -> int:
    torch.manual_seed(0)
    source = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    for stage in (0, 1, 2, 3):
        config = {"train_batch_size": 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage}}
        config["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
        engine = zengine.initialize(model=nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1)), config=config)[0]
        values = (
            source.state_dict() if zcomm.group_rank() == 0 else {k: v * 0 for k, v in source.state_dict().items()}
        )
        engine.load_state_dict(values)
        for name, param in engine.module.named_parameters():
            assert torch.equal(zpartition.safe_get_full_fp32_param(param), source.state_dict()[name]), (stage, name)
        assert all(torch.equal(v, source.state_dict()[k].bfloat16()) for k, v in engine.state_dict().items())
        engine.close()
    return zcomm.group_size()


@pytest.mark.parametrize("world_size", [1, 2])
def test_masters_of_16_bit_weights_are_not_rounded_by_a_load(world_size) -> None:
    assert run_ranks(_masters_get_all_digits, world_size) == [world_size] * world_size
