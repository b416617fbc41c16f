"""Attributes and settings that users read from an engine."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zckpt
import zengine


@pytest.fixture
def engine() -> zengine.Engine:
    config = {
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 0.25}},
    }
    return zengine.initialize(model=nn.Linear(2, 1), config=config)[0]


def test_what_was_decided(engine):
    assert engine.get_batch_info() == (12, 4, 3)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 4)
    assert engine.gradient_accumulation_steps() == 3
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (1, True)
    assert (engine.bfloat16_enabled(), engine.fp16_enabled()) == (True, False)
    assert engine.gradient_clipping() == 0.5
    assert engine.get_lr() == [0.25]
    assert engine.current_loss_scale == 1.0


def test_the_config_is_the_resolved_plan_with_origins(engine):
    assert engine.config is engine.plan
    assert engine.config["gradient_accumulation_steps"] == 3
    assert "gradient_accumulation_steps" in str(engine.config)
    assert engine.config.origin("gradient_accumulation_steps") == "derived"


def test_rates_and_momenta_by_group():
    model = nn.Linear(2, 1)
    groups = [{"params": [model.weight], "momentum": 0.5}, {"params": [model.bias]}]
    own = zengine.initialize(
        model=model, optimizer=torch.optim.SGD(groups, lr=0.1), config={"train_batch_size": 1, "gradient_clipping": 0}
    )[0]
    assert (own.get_lr(), own.get_mom(), own.get_type()) == ([0.1, 0.1], [0.5, 0.0], [0.0, 0.0])
    own.set_lr(0.3)
    own.backward(own(torch.ones(1, 2)).sum())
    assert own.step().lr == (0.3, 0.3)
    own.set_lr([0.1, 0.2])
    assert own.get_lr() == [0.1, 0.2]
    for rates in ([0.5], (0.5, 0.5, 0.5), []):
        with pytest.raises(ValueError, match=rf"set_lr\(\) got {len(rates)} learning rates and the optimizer has 2 "):
            own.set_lr(rates)
    assert own.get_lr() == [0.1, 0.2]
    adam = {"train_batch_size": 1, "optimizer": {"type": "Adam", "params": {"betas": [0.8, 0.9]}}}
    assert zengine.initialize(model=nn.Linear(1, 1), config=adam)[0].get_mom() == [(0.8, 0.9)]
    assert zengine.initialize(model=nn.Linear(1, 1), config={"train_batch_size": 1})[0].get_mom() == []


def test_a_pause_is_a_context_whether_or_not_anything_is_measured(engine):
    with engine.paused(), torch.no_grad():
        engine(torch.ones(1, 2, dtype=torch.bfloat16))


def test_who_we_are(engine):
    assert (engine.global_rank, engine.local_rank, engine.world_size, engine.dp_world_size) == (0, 0, 1, 1)
    assert engine.parts.world.rank == 0
    assert engine.device == torch.device("cpu")


def test_where_we_are(engine):
    assert engine.get_global_grad_norm() is None
    assert not engine.was_step_applied()
    for _ in range(4):
        engine.backward(engine(torch.ones(4, 2, dtype=torch.bfloat16)).mean())
        engine.step()
    assert (engine.micro_steps, engine.global_steps, engine.applied_steps, engine.skipped_steps) == (4, 1, 1, 0)
    assert engine.global_samples == 12
    assert engine.get_global_grad_norm() > 0
    assert not engine.was_step_applied()  # the last step() was between boundaries
    assert not engine.is_gradient_accumulation_boundary()


def test_the_schedule_is_settable_and_without_one_the_caller_advances_the_rates(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    halving = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    engine, _, _, schedule = zengine.initialize(
        model=model, optimizer=optimizer, lr_scheduler=halving, config={"train_batch_size": 1}
    )

    def rate_after_a_step() -> float:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        return engine.get_lr()[0]

    assert engine.lr_scheduler is schedule is halving
    assert rate_after_a_step() == 0.5
    engine.lr_scheduler = None
    assert engine.lr_scheduler is None
    assert rate_after_a_step() == 0.5
    halving.step()
    assert rate_after_a_step() == 0.25
    engine.save_checkpoint(str(tmp_path), "without")  # the caller saves the schedule
    engine.lr_scheduler = halving
    assert rate_after_a_step() == 0.125
    with pytest.raises(zckpt.CheckpointMismatch, match="holds the schedule ConstantRate, and this engine has Expon"):
        engine.load_checkpoint(str(tmp_path), "without")
    engine.load_checkpoint(str(tmp_path), "without", load_lr_scheduler_states=False)
    assert engine.get_lr() == [0.25]


def test_objects_of_the_caller_and_groups_of_the_ranks():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    own, *_ = zengine.initialize(
        model=model,
        optimizer=optimizer,
        config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
    )
    assert own.client_optimizer is own.basic_optimizer is optimizer
    assert (own.optimizer_name(), own.client_lr_scheduler, own.mpu) == ("SGD", None, None)
    assert (own.mp_world_size, own.seq_dp_world_size, own.get_data_parallel_rank()) == (1, 1, 0)
    assert (own.get_model_parallel_rank(), own.get_tensor_parallel_rank()) == (0, 0)
    assert own.data_parallel_group == own.seq_data_parallel_group == own.parts.groups.data()
    assert (own.has_moe_layers, own.num_experts, own.expert_parallel_group) == (False, [], {})
    assert (own.pipeline_parallelism, own.gradient_average, own.inside_no_sync_ctxt) == (False, True, False)
    assert own.param_names == {model.weight: "weight", model.bias: "bias"}
    assert own.all_gather_scalar(torch.tensor([3]), own.data_parallel_group) == [torch.tensor([3])]
    applied = []
    for _ in range(3):
        own.backward(own(torch.ones(1, 2)).sum())
        own.step()
        applied.append(own.was_step_applied())
    assert applied == [False, True, False]
    with own.no_sync():
        assert own.inside_no_sync_ctxt


def test_experts_are_known_to_the_engine():
    from zpartition.experts import MoE

    model = MoE(4, nn.Linear(4, 4), num_experts=2)
    own, *_ = zengine.initialize(model=model, config={"train_batch_size": 1})
    assert (own.has_moe_layers, own.num_experts) == (True, [2])
    assert own.expert_parallel_group == {"ep_size_1": own.parts.groups.experts()}
    assert own.expert_data_parallel_group == {"ep_size_1": own.parts.groups.expert_data()}
