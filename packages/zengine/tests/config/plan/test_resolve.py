"""From config to plan: every value, its origin, and all broken rules in one error."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import zckpt
from zengine.config import ConfigError, Facts, Plan, load, resolve
from zpartition import Averaging, ReduceAt, SparseGradients, ZeroPolicy
from zprecision import BF16, FP16, DynamicScaling, Precision, StaticScaling, Unscaled


def plan_of(source: Any = None, /, *, replicas: int = 2, bf16_is_faster: bool = False, **more: Any) -> Plan:
    config = source if isinstance(source, str) else {"train_micro_batch_size_per_gpu": 1, **(source or {}), **more}
    facts = Facts(world_size=replicas, replicas=replicas, bf16_is_faster=bf16_is_faster)
    return resolve(load(config), facts)


def test_the_smallest_config_is_fp32_unsharded_and_clipped() -> None:
    plan = plan_of()
    assert (plan.batch.train_batch_size, plan.batch.micro_batch_size, plan.batch.accumulation) == (2, 1, 1)
    assert (plan.precision, plan.scaling, plan.cast_inputs) == (Precision(), Unscaled(), False)
    own = ZeroPolicy(sparse_gradients=SparseGradients.DENSE, accumulate_dtype=None, master_dtype=None)
    assert plan.zero == own
    assert (plan.optimizer.type, plan.scheduler.type) == ("", "")
    assert (plan.clip_norm, plan.skip_nonfinite) == (1.0, True)
    assert (plan.data.drop_last, plan.data.seed) == (False, 1234)
    assert (plan.checkpoint.tag_validation, plan.dump_state, plan.log_level) == ("WARN", False, "")
    assert plan.keep is zckpt.KEEP_ALL
    assert plan.managed_accumulation is True
    assert (plan.telemetry.steps_per_print, plan.telemetry.throughput) == (0, True)


def test_the_batch_equation_uses_the_replicas_not_the_world() -> None:
    facts = Facts(world_size=8, replicas=4)
    plan = resolve(load({"train_batch_size": 32, "gradient_accumulation_steps": 2}), facts)
    assert (plan.batch.micro_batch_size, plan.batch.replicas) == (4, 4)


@pytest.mark.parametrize(
    ("source", "precision", "scaling"),
    [
        ({"bf16": {"enabled": True}}, BF16, Unscaled()),
        ({"fp16": {"enabled": True}}, FP16, DynamicScaling()),
        ({"fp16": {"enabled": True, "loss_scale": 128}}, FP16, StaticScaling(128.0)),
        ({"fp16": {"enabled": True, "min_loss_scale": 0}}, FP16, DynamicScaling(floor=2.0**-126)),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 10, "hysteresis": 3,
                      "consecutive_hysteresis": True, "min_loss_scale": 0.5}},
            FP16,
            DynamicScaling(initial=256.0, window=10, hysteresis=3, consecutive_hysteresis=True, floor=0.5),
        ),
        (
            {"bf16": {"enabled": True}, "communication_data_type": "fp32",
             "data_types": {"grad_accum_dtype": "bf16"}},
            Precision(param=torch.bfloat16, reduce=torch.float32, accumulate=torch.bfloat16),
            Unscaled(),
        ),
    ],
)  # fmt: skip
def test_precision_follows_the_half_precision_sections(source: dict[str, Any], precision: Any, scaling: Any) -> None:
    plan = plan_of(source)
    assert (plan.precision, plan.scaling) == (precision, scaling)
    asked = source.get("communication_data_type")
    assert plan.zero.reduce_dtype == (precision.reduce if asked else None)  # None: as each parameter
    assert plan.zero.accumulate_dtype == precision.accumulate
    assert plan.zero.master_dtype == precision.master


@pytest.mark.parametrize(("is_faster", "param"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_bf16_follows_the_measurement(is_faster: bool, param: torch.dtype) -> None:
    plan = plan_of({"bf16": {"enabled": "auto"}}, bf16_is_faster=is_faster)
    assert plan.precision.param == param
    assert plan.origins["bf16.enabled"] == "auto"
    assert any("not faster" in notice for notice in plan.notices) is not is_faster


def test_updates_with_non_finite_gradients_are_left_out_unless_bf16_says_otherwise() -> None:
    lax = {"enabled": True, "check_grad_overflow": False}
    assert plan_of({"bf16": lax}).skip_nonfinite is False
    assert plan_of({"bf16": {"enabled": True}}).skip_nonfinite is True
    assert plan_of({"bf16": {**lax, "enabled": "auto"}}, bf16_is_faster=False).skip_nonfinite is True
    assert plan_of({"fp16": {"enabled": True}}).skip_nonfinite is True


def test_zero_and_averaging_reach_the_policy() -> None:
    plan = plan_of(
        {
            "zero_optimization": {
                "stage": 2,
                "reduce_bucket_size": 5e8,
                "overlap_comm": False,
                "ignore_unused_parameters": False,
            },
            "gradient_predivide_factor": 2,
        }
    )
    assert plan.zero == ZeroPolicy(
        sparse_gradients=SparseGradients.DENSE,
        stage=2,
        bucket_numel=500_000_000,
        averaging=Averaging(predivide=2.0),
        overlap=False,
        ignore_unused=False,
    )
    once = plan_of({"zero_optimization": {"stage": 1, "reduce_at": "boundary"}}).zero
    assert once.reduce_at is ReduceAt.BOUNDARY
    assert plan_of({"prescale_gradients": True}).zero.averaging == Averaging(prescale=True)
    assert plan_of({"gradient_allreduce_op": "sum"}).zero.averaging == Averaging(operation="sum")


def test_shard_groups_fit_the_ranks_and_go_by_their_old_name() -> None:
    zero = {"stage": 3, "mics_shard_size": 4, "mics_hierarchical_params_gather": True}
    assert plan_of({"zero_optimization": zero}, replicas=8).zero.shard_group_size == 4
    assert plan_of({"zero_optimization": {"stage": 3, "mics_shard_size": -1}}, replicas=8).zero.shard_group_size == 0
    with pytest.raises(ConfigError) as caught:
        plan_of({"zero_optimization": {"stage": 1, "shard_group_size": 3}}, replicas=8)
    assert str(caught.value.problems[0]) == (
        "zero_optimization.shard_group_size = 3: it does not divide the 8 ranks that share this model. "
        "Choose one of 1, 2, 4, 8, or 0 for one group of all."
    )


def test_leaf_modules_and_sparse_gradients_are_shown_as_they_were_given() -> None:
    leaves = {"classes": ["A"], "name_suffixes": ["b", "c"]}
    text = plan_of({"zero_optimization": {"stage": 3, "leaf_module": leaves}, "sparse_gradients": True}).describe()
    rows = {line.split()[0]: line.split("  ") for line in text.splitlines()}
    shown = {key: [cell.strip() for cell in row if cell.strip()][1] for key, row in rows.items() if len(row) > 1}
    assert shown["zero_optimization.leaf_module.classes"] == "A"
    assert shown["zero_optimization.leaf_module.names"] == "(none)"
    assert shown["zero_optimization.leaf_module.name_suffixes"] == "b, c"
    assert shown["sparse_gradients"] == "true"


def test_the_remaining_sections_reach_their_parts() -> None:
    plan = plan_of(
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "betas": [0.9, 0.95]}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 5}},
            "fp16": {"enabled": True, "auto_cast": True},
            "gradient_clipping": 0,
            "dataloader_drop_last": True,
            "data_efficiency": {"seed": 7},
            "steps_per_print": 10,
            "wall_clock_breakdown": True,
            "memory_breakdown": True,
            "timers": {"throughput": {"enabled": False}},
            "comms_logger": {"enabled": True},
            "tensorboard": {"enabled": True, "output_path": "runs", "job_name": "a"},
            "wandb": {"enabled": True, "team": "t", "group": "g"},
            "checkpoint": {
                "tag_validation": "Fail",
                "keep": {"last": 2, "best": ["loss", "f1:max:3"], "tags": ["v*"]},
            },
            "dump_state": True,
            "log_level": "INFO",
        }
    )
    assert (plan.optimizer.type, dict(plan.optimizer.params)) == ("AdamW", {"lr": 0.1, "betas": [0.9, 0.95]})
    assert (plan.scheduler.type, dict(plan.scheduler.params)) == ("WarmupLR", {"warmup_num_steps": 5})
    assert (plan.cast_inputs, plan.clip_norm, plan.data.drop_last, plan.data.seed) == (True, 0.0, True, 7)
    telemetry = plan.telemetry
    assert (telemetry.steps_per_print, telemetry.wall_clock_breakdown, telemetry.memory_breakdown) == (10, True, True)
    assert (telemetry.throughput, telemetry.comms_log) == (False, True)
    assert (telemetry.tensorboard.output_path, telemetry.tensorboard.job_name) == ("runs", "a")
    assert telemetry.csv_monitor.enabled is False
    assert (telemetry.wandb.team, telemetry.wandb.group, telemetry.wandb.project) == ("t", "g", "deepspeed")
    assert (plan.checkpoint.tag_validation, plan.dump_state, plan.log_level) == ("FAIL", True, "info")
    best = (zckpt.Best("loss", "min"), zckpt.Best("f1", "max", 3))
    assert plan.keep == zckpt.Retention(last=2, best=best, tags=("v*",))


def test_all_broken_rules_come_in_one_error() -> None:
    text = """{
      "train_batch_size": 64,
      "train_micro_batch_size_per_gpu": 4,
      "gradient_accumulation_steps": 3,
      "fp16": {"enabled": true},
      "bf16": {"enabled": true},
      "data_parallel_size": 2
    }"""
    with pytest.raises(ConfigError) as caught:
        plan_of(text, replicas=4)
    assert str(caught.value) == (
        "the config text: 3 problems\n"
        "  <json>:2:7: train_batch_size 64 = micro 4 x accumulation 3 x replicas 4 does not hold (48) "
        "[lines 2, 3, 4]. Set accumulation to 4, or train_batch_size to 48.\n"
        "  <json>:5:16: fp16.enabled (<json>:5) and bf16.enabled (<json>:6) are both on. Keep one of them.\n"
        "  <json>:7:7  data_parallel_size = 2: this run has 4 replicas (world size 4). "
        "Start 2 replicas, set it to 4, or leave it out."
    )


def test_a_config_without_a_batch_size_is_one_line() -> None:
    with pytest.raises(ConfigError, match=r"^the config dict: neither train_batch_size nor train_micro"):
        resolve(load({}), Facts(world_size=1, replicas=1))


@pytest.mark.parametrize(
    ("sizes", "derived", "default"),
    [
        ({"train_batch_size": 8}, {"train_micro_batch_size_per_gpu"}, {"gradient_accumulation_steps"}),
        ({"train_micro_batch_size_per_gpu": 8}, {"train_batch_size"}, {"gradient_accumulation_steps"}),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}, {"gradient_accumulation_steps"}, set()),
        ({"train_batch_size": 8, "gradient_accumulation_steps": 2}, {"train_micro_batch_size_per_gpu"}, set()),
        ({"train_batch_size": None, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 2},
         {"train_batch_size"}, set()),
    ],
)  # fmt: skip
def test_batch_origins_tell_derived_from_default(sizes: dict[str, Any], derived: set[str], default: set[str]) -> None:
    origins = resolve(load(sizes), Facts(world_size=2, replicas=2)).origins
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert {key for key in keys if origins[key] == "derived"} == derived
    assert {key for key in keys if origins[key] == "default"} == default
    assert {key for key in keys if origins[key] == "dict"} == set(keys) - derived - default


def test_origins_name_lines_options_and_what_was_worked_out() -> None:
    origins = plan_of('{"train_batch_size": 8,\n"optimizer": {"type": "SGD", "params": {\n"lr": 0.1}}}').origins
    assert origins["train_batch_size"] == "<json>:1"
    assert origins["optimizer.type"] == "<json>:2"
    assert origins["optimizer.params.lr"] == "<json>:3"
    assert origins["communication_data_type"] == origins["data_parallel_size"] == "derived"
    assert origins["zero_optimization.stage"] == "default"


def test_a_default_that_once_was_another_is_announced() -> None:
    assert any(notice.startswith("gradient_clipping is not given") for notice in plan_of().notices)
    assert plan_of({"gradient_clipping": 1.0}).notices == ()


def test_dynamic_keys_beside_a_static_scale_are_said_to_have_no_effect() -> None:
    plan = plan_of({"fp16": {"enabled": True, "loss_scale": 8, "hysteresis": 3}, "gradient_clipping": 1})
    assert plan.notices == ("dict: fp16.hysteresis has no effect here: fp16.loss_scale is static",)


def test_resolving_is_pure_and_a_plan_travels_between_processes() -> None:
    config = load({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    facts = Facts(world_size=2, replicas=2)
    plan = resolve(config, facts)
    assert plan == resolve(config, facts)
    assert pickle.loads(pickle.dumps(plan)) == plan


@pytest.mark.parametrize(
    ("source", "averaging", "notices"),
    [
        ({"prescale_gradients": True}, Averaging(prescale=True), []),
        ({"gradient_predivide_factor": 2}, Averaging(predivide=2.0), []),
        (
            {"prescale_gradients": True, "gradient_predivide_factor": 2},
            Averaging(prescale=True),
            ["dict: gradient_predivide_factor has no effect here: prescale_gradients divides before the sum"],
        ),
        (
            {"gradient_allreduce_op": "Sum", "prescale_gradients": 1, "gradient_predivide_factor": 2},
            Averaging(operation="sum"),
            [
                'dict: prescale_gradients has no effect here: gradient_allreduce_op is "sum"',
                'dict: gradient_predivide_factor has no effect here: gradient_allreduce_op is "sum"',
            ],
        ),
    ],
)
def test_one_key_divides_gradients_and_the_others_say_that_they_do_not(
    source: dict[str, Any], averaging: Averaging, notices: list[str]
) -> None:
    plan = plan_of(source)
    assert plan.zero.averaging == averaging
    assert [notice for notice in plan.notices if "no effect" in notice] == notices
