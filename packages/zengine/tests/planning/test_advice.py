"""What is worth knowing: each sentence where its subject acts, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zengine.config import Facts, load, resolve
from zengine.planning.advice import Case, worth_knowing
from zengine.planning.models import Shape, Transformer
from zengine.planning.sizes import sizes

QUIET = {"train_micro_batch_size_per_gpu": 4, "config_version": "zengine-0.2"}


def advice(world_size: int = 8, device: str = "cuda", **source: Any) -> list[str]:
    config = load({**QUIET, **source})
    facts = Facts(world_size=world_size, replicas=world_size, device_type=device)
    plan = resolve(config, facts)
    with torch.device("meta"):
        module = plan.precision.cast_module(Transformer(Shape(layers=2, width=256, vocabulary=1000)))
    own = sizes(module, plan, world_size=world_size, device=device)
    return list(worth_knowing(Case(config=config, plan=plan, facts=facts, module=module, sizes=own)))


def test_a_plain_config_is_told_nothing() -> None:
    assert advice() == []


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100, "warmup_type": "linear"}}},
            "The first 2 updates run at a learning rate of 0: 64 samples change nothing.",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1, "warmup_num_steps": 900}}},
            "half of the peak rate is reached at update 30 of 900.",
        ),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            "4 ranks hold one copy of the model (pipeline 1 x tensor 4), and 2 hold the same parts.",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            "4 ranks share the experts of each layer out.",
        ),
        ({"fp16": {"enabled": True}}, "The loss scale starts at 65,536"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}, 'optimizer.type "Adam" is AdamW'),
        ({"gradient_accumulation_steps": 4}, "With 4 micro-steps gradients travel 4 times"),
        (
            {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
            'In zero_optimization, stage 1 with "reduce_at": "boundary" sends ',
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, "reduce_bucket_size 500,000,000 costs "),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0}}, "Stage 3 sends 1.4"),
        (
            {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 1000}},
            "stage3_max_live_parameters 1,000,000,000 lets ",
        ),
        ({"zero_optimization": {"stage": 3}}, "are below stage3_param_persistence_threshold (100,000)"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "on a host with 8 ranks and page-locked",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "of files for each rank",
        ),
    ],
)
def test_a_subject_that_acts_is_spoken_of(source: dict[str, Any], sentence: str) -> None:
    found = advice(**source)
    assert any(sentence in each for each in found), found


def test_numbers_of_traffic_are_those_of_the_other_plan() -> None:
    (told,) = (each for each in advice(gradient_accumulation_steps=4) if "boundary" in each)
    sent = [float(word) for word in told.split() if "." in word and word.replace(".", "").isdigit()]
    assert sent[0] == pytest.approx(4 * sent[1], rel=0.01)


def test_a_rank_alone_is_told_that_stages_are_alike() -> None:
    assert advice(world_size=1, zero_optimization={"stage": 2})[0].startswith("On one rank stage 2 shards nothing")


def test_notices_of_the_plan_come_last() -> None:
    assert advice(vocabulary_size=8)[-1].startswith("dict: vocabulary_size has no effect here")
