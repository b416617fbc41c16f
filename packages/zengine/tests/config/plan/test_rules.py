"""Rules between keys, each broken alone, and all together."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import load, violations
from zengine.config.plan.precision_rules import PRECISION_RULES
from zengine.config.plan.rules import RULES

BREAKING: dict[str, tuple[dict[str, Any], str]] = {
    "check_reduce_at": (
        {"zero_optimization": {"stage": 2, "reduce_at": "boundary"}},
        'zero_optimization.reduce_at = "boundary" keeps a full gradient on every rank, which '
        "zero_optimization.stage = 2 avoids. "
        'Use stage 1 for one reduction per step, or "micro_step".',
    ),
    "check_scale_floor": (
        {"fp16": {"enabled": True, "initial_scale_power": 2, "min_loss_scale": 8}},
        "fp16.min_loss_scale = 8 is above the first scale, 2 to the fp16.initial_scale_power 2 = 4. "
        "Lower the floor or raise the power.",
    ),
    "check_shard_group_stage": (
        {"zero_optimization": {"mics_shard_size": 2}},
        "zero_optimization.shard_group_size = 2, but at stage 0 nothing is sharded. "
        'Set "stage" to 1, 2 or 3, or leave shard_group_size out.',
    ),
    "check_compressed_optimizer": (
        {"zero_optimization": {"stage": 2}, "optimizer": {"type": "OneBitAdam"}},
        "zero_optimization.stage = 2 shards what OneBitAdam needs whole on every rank: ranks average their whole "
        "momenta in one bit an element. Set the stage to 1 or 0, or use AdamW.",
    ),
    "check_nvme_path": (
        {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme"}}},
        'zero_optimization.offload_optimizer.device = "nvme" needs a folder on a local drive. '
        'Add "nvme_path": "/local/nvme" to offload_optimizer.',
    ),
    "check_keep_last": (
        {"checkpoint": {"keep": {"best": "loss"}}},
        "checkpoint.keep.best extends checkpoint.keep.last, which is not set. "
        "Set checkpoint.keep.last to 1 or more, or leave the section out to keep all checkpoints.",
    ),
    "check_signals_save_dir": (
        {"signals": {"sigterm": "checkpoint"}},
        'signals.sigterm = "checkpoint", but signals.save_dir is not set, so there is no folder to save into. '
        'Add "save_dir": "checkpoints" to the section (the folder that you pass to save_checkpoint), or write '
        '"sigterm": "exit" to leave without a save.',
    ),
    "check_contiguous_checkpointing": (
        {"activation_checkpointing": {"partition_activations": True, "contiguous_memory_optimization": True}},
        "activation_checkpointing.contiguous_memory_optimization keeps parts of activations in one buffer, "
        'and number_checkpoints is not set. Set "partition_activations" to true and "number_checkpoints" to the '
        "number of checkpointed blocks, or leave it out.",
    ),
    "check_diloco": (
        {"diloco": {"sync_every": 10, "fragments": 4, "sync_delay": 2}},
        "diloco.sync_delay = 2 steps reach the next exchange, which begins 2 steps later (sync_every 10 / 4 "
        "fragments). Use at most 1.",
    ),
    "check_zenflow": (
        {"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}},
        "zenflow updates the rest of the weights on the CPU, and zero_optimization.offload_optimizer.device is "
        '"none". Add "offload_optimizer": {"device": "cpu"} to zero_optimization, or leave zenflow out.',
    ),
    "check_moq_bits": (
        {"quantize_training": {"enabled": True, "quantize_bits": {"start_bits": 4, "target_bits": 8}}},
        "quantize_training.quantize_bits.target_bits = 8 is above quantize_training.quantize_bits.start_bits = 4: "
        "bits only fall. Lower it, or raise start_bits.",
    ),
}


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule not in PRECISION_RULES], ids=lambda rule: rule.__name__
)
def test_each_rule_reports_its_violation_and_no_other_rule_does(rule: Any) -> None:
    source, text = BREAKING[rule.__name__]
    assert [str(problem) for problem in violations(load(source))] == [text]
    assert rule(load({})) is None


@pytest.mark.parametrize(
    "source",
    [
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "bf16"}},
        {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp16"}},
        {"fp16": {"enabled": True, "loss_scale": 2, "min_loss_scale": 1e9}},
        {"fp16": {"enabled": True, "initial_scale_power": 3, "min_loss_scale": 8}},
        {"prescale_gradients": True, "gradient_predivide_factor": 2.0},
        {"gradient_predivide_factor": 4},
        {"gradient_allreduce_op": "sum", "prescale_gradients": True, "gradient_predivide_factor": 2},
        {"fp16": {"enabled": False, "min_loss_scale": 1e9}, "bf16": {"enabled": True}},
    ],
)
def test_what_only_looks_like_a_conflict_passes(source: dict[str, Any]) -> None:
    assert violations(load(source)) == []


def test_a_violation_in_a_file_names_both_lines() -> None:
    (problem,) = violations(load('{"fp16": {"enabled": true},\n"bf16": {"enabled": "auto"}}'))
    assert str(problem) == (
        "<json>:1:11: fp16.enabled (<json>:1) and bf16.enabled (<json>:2) are both on. Keep one of them."
    )
