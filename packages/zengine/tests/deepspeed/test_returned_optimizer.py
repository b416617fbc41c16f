"""The optimizer that deepspeed.initialize returns: DeepSpeed's class for the config, its names, and its own class."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
import zoptim
from zcomm.testing import run_ranks
from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zengine.deepspeed.runtime.base_optimizer import DeepSpeedOptimizer, ZeROOptimizer
from zengine.deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from zengine.deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from zengine.deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
from zengine.deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from zengine.deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from zengine.deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}}
BF16 = {"bf16": {"enabled": True}}
CPU = {"offload_optimizer": {"device": "cpu"}}


def make(config: dict[str, Any], own: Any = None) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    optimizer = own and own(model.parameters(), lr=0.1)
    settings = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[:2]


def train(engine: Any, factor: float = 1.0) -> None:
    x = torch.ones(1, 2, dtype=engine.module.weight.dtype)
    engine.backward(engine(x).float().sum() * factor)
    engine.step()


@pytest.mark.parametrize(
    ("config", "own", "wrapper", "inner"),
    [  # wrapper: as DeepSpeed 0.19.8 chooses it
        (ADAM, None, None, FusedAdam),
        ({}, torch.optim.AdamW, None, torch.optim.AdamW),
        ({**ADAM, **FP16}, None, FP16_Optimizer, FusedAdam),
        ({**ADAM, **BF16}, None, FP16_Optimizer, FusedAdam),
        (FP16, torch.optim.SGD, FP16_UnfusedOptimizer, torch.optim.SGD),
        (BF16, FusedAdam, FP16_Optimizer, FusedAdam),
        ({**ADAM, "zero_optimization": {"stage": 1}}, None, DeepSpeedZeroOptimizer, FusedAdam),
        ({**ADAM, **BF16, "zero_optimization": {"stage": 1}}, None, DeepSpeedZeroOptimizer, FusedAdam),
        (
            {**ADAM, **BF16, "zero_optimization": {"stage": 1}, "data_types": {"grad_accum_dtype": "fp32"}},
            *(None, BF16_Optimizer, FusedAdam),
        ),
        ({**ADAM, "zero_optimization": {"stage": 2, **CPU}}, None, DeepSpeedZeroOptimizer, DeepSpeedCPUAdam),
        ({**ADAM, "zero_optimization": {"stage": 3}}, None, DeepSpeedZeroOptimizer_Stage3, FusedAdam),
    ],
)
def test_its_class_is_its_own_and_the_ones_that_deepspeed_has_for_the_config(config, own, wrapper, inner):
    engine, optimizer = make(config, own)
    wrappers = (
        *(FP16_Optimizer, FP16_UnfusedOptimizer, BF16_Optimizer),
        *(DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3),
    )
    assert [kind for kind in wrappers if isinstance(optimizer, kind)] == [wrapper] * (wrapper is not None)
    assert isinstance(optimizer, DeepSpeedOptimizer) == (wrapper is not None)
    assert isinstance(optimizer, inner)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(engine)
    if wrapper is not None:
        assert optimizer.optimizer is optimizer
    copies = (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)))
    engine.close()
    kind = (zoptim.AdamW if own is None else own).__name__
    assert not isinstance(optimizer, DeepSpeedOptimizer)
    assert {type(each) for each in (optimizer, *copies)} == {type(optimizer)}
    assert type(optimizer).__name__ == kind


@pytest.mark.parametrize("torch_adam", [False, True])
@pytest.mark.parametrize("mode", [False, True])
def test_adam_of_the_config_is_deepspeeds_or_torchs(torch_adam, mode):
    params = {"torch_adam": torch_adam, "adam_w_mode": mode}
    _, optimizer = make({"optimizer": {"type": "Adam", "params": params}, "zero_optimization": {"stage": 2}})
    assert isinstance(optimizer.optimizer, FusedAdam) is not torch_adam
    if torch_adam:
        assert isinstance(optimizer.optimizer, torch.optim.AdamW) == mode
    else:
        assert optimizer.optimizer.adam_w_mode == mode


def test_a_dynamic_loss_scale_is_shown_and_can_be_set():
    engine, optimizer = make({**ADAM, **FP16})
    scales = []
    for factor in (1.0, 1.0, 1.0, 1e6, 1.0):
        train(engine, factor)
        scales.append((optimizer.cur_scale, optimizer.overflow, optimizer.cur_iter, optimizer.last_overflow_iter))
    assert scales == [(16, False, 1, -1), (16, False, 2, -1), (32, False, 3, -1), (16, True, 4, 3), (16, False, 5, 3)]
    assert isinstance(optimizer.loss_scaler, DynamicLossScaler)
    assert (optimizer.dynamic_loss_scale, optimizer.scale_window, optimizer.scale_factor) == (True, 2, 2.0)
    shown = optimizer.loss_scale_config
    assert (shown.cur_scale, shown.cur_iter, shown.last_overflow_iter, shown.scale_window) == (16, 5, 3, 2)
    optimizer.loss_scale = 4.0
    assert optimizer.cur_scale == engine.current_loss_scale == optimizer.loss_scaler.cur_scale == 4.0
    assert optimizer._global_grad_norm == pytest.approx(engine.get_global_grad_norm())


def test_a_constant_loss_scale_is_shown():
    _, optimizer = make({**ADAM, "fp16": {"enabled": True, "loss_scale": 8}})
    assert (optimizer.loss_scale, optimizer.dynamic_loss_scale, optimizer.cur_iter) == (8.0, False, 0)
    assert isinstance(optimizer.loss_scaler, LossScaler)
    with pytest.raises(AttributeError, match=r"set by the config: fp16\.loss_scale"):
        optimizer.loss_scale = 4.0


def test_groups_of_parameters_and_masters_and_their_refreshing():
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.0}]
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(groups, lr=0.5),
        config={"train_batch_size": 1, **BF16, "zero_optimization": {"stage": 1}},
    )
    assert isinstance(optimizer, ZeROOptimizer)
    first, second = optimizer.bit16_groups
    assert first[0] is model.weight
    assert second[0] is model.bias
    flat = optimizer.single_partition_of_fp32_groups
    assert [each.dtype for each in flat] == [torch.float32, torch.float32]
    assert torch.equal(flat[0][:6].bfloat16(), model.weight.detach().reshape(-1))
    with torch.no_grad():
        model.weight.fill_(2.0)
    optimizer.refresh_fp32_params()
    assert optimizer.fp32_groups[0][0].tolist() == [[2.0, 2.0]] * 3
    assert torch.equal(optimizer.single_partition_of_fp32_groups[0][:6], torch.full((6,), 2.0))
    assert optimizer.dp_process_group == engine.parts.partition.group
    assert (optimizer.partition_count, optimizer.clip_grad, optimizer.get_lr()) == ([1, 1], 1.0, 0.5)


def test_partitions_of_weights_and_gradients() -> None:
    """As DeepSpeed's tests read them."""
    engine, optimizer = make({**ADAM, "zero_optimization": {"stage": 2}})
    weight, bias = engine.module.weight, engine.module.bias
    assert optimizer.averaged_gradients == {}
    engine.backward(engine(torch.ones(1, 2)).sum())
    (gradients,) = optimizer.averaged_gradients.values()
    assert [each.tolist() for each in gradients] == [[1.0] * 4, [1.0] * 2]
    engine.step()
    assert [{id(each) for each in group} for group in optimizer.params_in_partition] == [{id(weight), id(bias)}]
    assert optimizer.params_not_in_partition == [[]]
    (flat,), ((part,),) = optimizer.bit16_groups_flat, optimizer.parallel_partitioned_bit16_groups
    assert part.data_ptr() == flat.data_ptr() == min(weight.data_ptr(), bias.data_ptr())
    assert part.data_ptr() % (2 * optimizer.nccl_start_alignment_factor) == 0
    (master,) = optimizer.single_partition_of_fp32_groups
    assert optimizer.state[master]["exp_avg"].shape == master.shape


def test_sub_groups_of_stage_3() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    engine, optimizer = make({**ADAM, "zero_optimization": zero})
    train(engine)
    optimizer._set_fp32_optimizer_param_groups()
    masters = optimizer.fp32_partitioned_groups_flat
    assert [sorted(each.numel() for each in group) for group in optimizer.fp16_groups] == [[2, 4]]
    assert [float(optimizer.state[master]["step"]) for master in masters] == [1.0]
    optimizer._clear_fp32_optimizer_param_groups()
    first = deepspeed.utils.safe_get_full_fp32_param(optimizer.fp16_groups[0][0]).reshape(-1)
    assert torch.equal(masters[0][: first.numel()], first)
    assert engine.module.ds_grads_remaining == 0


class Wrapping(torch.optim.SGD):
    """An optimizer of the caller with attributes that DeepSpeed's classes have, too."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.optimizer, self.clip_grad = "mine", 7

    def get_lr(self) -> str:
        return "mine"


def test_attributes_of_the_callers_class_come_first():
    engine, optimizer = make({"zero_optimization": {"stage": 1}}, Wrapping)
    train(engine)
    assert (optimizer.optimizer, optimizer.clip_grad, optimizer.get_lr()) == ("mine", 7, "mine")
    assert isinstance(optimizer, DeepSpeedZeroOptimizer)


def test_it_does_not_keep_a_deleted_engine_alive():
    engine, optimizer = make({**ADAM, "zero_optimization": {"stage": 1}})
    del engine
    gc.collect()
    with pytest.raises(RuntimeError, match="the engine of this optimizer was deleted"):
        optimizer.fp16_groups  # noqa: B018


def test_the_classes_make_no_optimizers():
    with pytest.raises(TypeError, match=r"FP16_Optimizer is made by deepspeed\.initialize\(optimizer=\.\.\.\)"):
        FP16_Optimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))


def test_a_state_dict_is_loaded_while_the_class_is_deepspeeds():
    engine, optimizer = make({**ADAM, "zero_optimization": {"stage": 1}})
    train(engine)
    optimizer.load_state_dict(optimizer.state_dict())
    before = engine.module.weight.detach().clone()
    train(engine)
    assert not torch.equal(engine.module.weight, before)


def test_names_of_a_sharded_optimizers_parts():
    engine, optimizer = make({**ADAM, "zero_optimization": {"stage": 2}})
    assert optimizer.averaged_gradients == {}
    x = torch.ones(1, 2)
    engine.backward(engine(x).sum())
    found = optimizer.averaged_gradients
    assert list(found) == [0]
    assert torch.equal(torch.cat(found[0]), torch.ones(6))  # weight and bias
    masters = [group["params"] for group in optimizer.param_groups]
    optimizer._clear_fp32_optimizer_param_groups()
    assert optimizer.param_groups[0]["params"] == []
    optimizer._set_fp32_optimizer_param_groups()
    assert [group["params"] for group in optimizer.param_groups] == masters
    assert engine.step()
    step = 2 * optimizer.nccl_start_alignment_factor
    parts = optimizer.parallel_partitioned_bit16_groups
    assert all(part.data_ptr() % step == 0 for group in parts for part in group)
    weights = torch.cat([param.detach().reshape(-1) for param in engine.module.parameters()])
    assert torch.cat([part for group in parts for part in group]).sum() == pytest.approx(float(weights.sum()))


def check_overflows(stage: int) -> list[bool]:
    """Only rank 0's gradient is infinite; returns the answers of each moment."""
    config = {**ADAM, **BF16, "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    engine, optimizer = make(config)
    found = [optimizer.has_overflow()]
    for factor in (1.0, float("inf") if engine.global_rank == 0 else 1.0):
        engine.backward(engine(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum() * factor)
        optimizer.check_overflow(partition_gradients=stage > 1)
        found.append(optimizer.overflow)
        report = engine.step()
        assert bool(report) is not optimizer.overflow
    return found


def test_gradients_are_checked_for_overflows_before_the_step() -> None:
    for stage in (1, 2, 3):
        assert run_ranks(check_overflows, 2, stage) == [[False, False, True]] * 2
