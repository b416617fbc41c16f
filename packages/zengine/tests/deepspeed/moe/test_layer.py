"""The layer by DeepSpeed's name: zpartition's, with DeepSpeed's attributes."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zcomm
import zengine.deepspeed as deepspeed
import zpartition.experts
from zcomm.testing import run_ranks
from zengine.deepspeed.moe.layer import MoE


def test_deepspeeds_attributes_show_gate_and_experts() -> None:
    torch.manual_seed(0)
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, k=1, capacity_factor=9.0, use_residual=True, use_rts=False)
    assert isinstance(layer, zpartition.experts.MoE)
    assert (layer.expert_group_name, layer.num_local_experts, layer.use_residual) == ("ep_size_1", 2, True)
    shown = layer.deepspeed_moe
    with pytest.raises(AttributeError, match="after the first forward"):
        _ = shown.l_aux
    x = torch.randn(8, 4)
    output, aux_loss, counts = layer(x)
    assert shown.l_aux is aux_loss
    assert shown.exp_counts is counts
    assert shown.gate.wg.weight is layer.gate.weight
    assert (shown.gate.k, shown.gate.use_rts, shown.gate.capacity_factor) == (1, False, 9.0)
    chosen = (x @ shown.gate.wg.weight.t()).softmax(dim=1)
    weight, number = chosen.max(dim=1)
    experts = shown.experts.deepspeed_experts
    assert [name for name, _ in experts[0].named_parameters()] == ["weight", "bias"]
    routed = torch.stack([experts[int(n)](row) for n, row in zip(number, x)]) * weight[:, None]
    mix = layer.coefficient(x).softmax(dim=-1)
    torch.testing.assert_close(output, routed * mix[:, :1] + layer.mlp(x) * mix[:, 1:])
    with torch.no_grad():
        next(experts[1].parameters()).zero_()
    assert not layer.experts.stacked.weight[1].any()
    assert experts[1].state_dict()["weight"].shape == (4, 4)


def test_groups_are_set_up_by_the_layer() -> None:
    layer = MoE(4, nn.Linear(4, 4), num_experts=2)
    layer.set_deepspeed_parallelism()
    assert deepspeed.utils.groups._get_expert_parallel_world_size(layer.expert_group_name) == 1
    assert deepspeed.utils.groups._get_expert_model_parallel_world_size() == 1
    with pytest.raises(ValueError, match="use_data_before_expert_parallel_=True is not available"):
        layer.set_deepspeed_parallelism(use_data_before_expert_parallel_=True)


def _copies_on_tensor_ranks() -> tuple[float, float]:
    """Return the gradient norm of an engine whose mpu has two tensor ranks that split nothing, and torch's."""
    torch.manual_seed(0)
    layer = MoE(4, nn.Linear(4, 4), num_experts=2, capacity_factor=9.0, use_rts=False)
    plain, x = copy.deepcopy(layer), torch.randn(6, 4)
    plain(x)[0].square().mean().backward()
    norm = torch.stack([param.grad.norm() for param in plain.parameters()]).norm()
    config = {"train_micro_batch_size_per_gpu": 6, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=layer, config=config, mpu=zcomm.Groups.of(zcomm.Degrees(tensor=2)))
    assert engine.num_local_experts == 2
    assert deepspeed.utils.groups._get_expert_model_parallel_world_size() == 1
    engine.backward(engine(x)[0].square().mean())
    assert engine.step().applied
    engine.close()
    return float(engine.last_report.grad_norm), float(norm)


def test_a_model_of_experts_may_be_whole_on_the_tensor_ranks_of_an_mpu() -> None:
    for found, wanted in run_ranks(_copies_on_tensor_ranks, 2):
        assert found == pytest.approx(wanted)
