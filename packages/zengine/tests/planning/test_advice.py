"""What is worth knowing: each sentence where its subject acts, and nowhere else."""

from __future__ import annotations

import itertools
import random
import re
from typing import Any

import attrs
import pytest
import torch

from zengine.config import ConfigError, Facts, load, resolve
from zengine.planning.advice import Advice, Case, advice_lines, collect_advice, with_changes
from zengine.planning.models import Shape, Transformer, shape_of
from zengine.planning.tables import gib

QUIET = {"train_micro_batch_size_per_gpu": 4, "config_version": "zengine-0.2"}


SMALL = Shape(layers=2, width=256, vocabulary=1000)


def case(source: dict[str, Any], world_size: int = 8, device: str = "cuda", shape: Shape = SMALL) -> Case:
    """Everything made anew from the source of a config."""
    config = load(source)
    facts = Facts(world_size=world_size, replicas=world_size, device_type=device)
    plan = resolve(config, facts)
    with torch.device("meta"):
        module = plan.precision.cast_module(Transformer(shape))
    return Case(config=config, plan=plan, facts=facts, module=module)


def advice(world_size: int = 8, device: str = "cuda", **source: Any) -> list[str]:
    return list(advice_lines(case({**QUIET, **source}, world_size, device)))


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
            "it is half-way to the peak rate at update 31 of 900.",
        ),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            "4 ranks hold one copy of the model (pipeline 1 x tensor 4), and 2 hold the same parts.",
        ),
        (
            {"expert_parallel": {"enabled": True, "autoep_size": 4}},
            "4 ranks shard the experts of each layer.",
        ),
        ({"fp16": {"enabled": True}}, "The loss scale starts at 65,536"),
        ({"optimizer": {"type": "Adam", "params": {"weight_decay": 0.1}}}, 'optimizer.type "Adam" is AdamW'),
        (
            {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 1, "reduce_at": "micro_step"}},
            "With 4 micro-steps gradients are reduced 4 times",
        ),
        (
            {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 0, "reduce_at": "micro_step"}},
            'In zero_optimization, "reduce_at": "boundary" sends ',
        ),
        (
            {"gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}},
            "In zero_optimization, stage 1 sends ",
        ),
        ({"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8}}, "reduce_bucket_size 500,000,000 costs "),
        ({"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 0}}, "Stage 3 sends 1.4"),
        (
            {
                "zero_optimization": {
                    "stage": 3,
                    "stage3_param_persistence_threshold": 1000,
                    "stage3_max_live_parameters": 1_000_000_000,
                }
            },
            "stage3_max_live_parameters 1,000,000,000 keeps up to ",
        ),
        ({"zero_optimization": {"stage": 3}}, "are below stage3_param_persistence_threshold (100,000)"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            "on a host with 8 ranks, ",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
            "of files per rank",
        ),
    ],
)
def test_a_subject_that_acts_is_spoken_of(source: dict[str, Any], sentence: str) -> None:
    found = advice(**source)
    assert any(sentence in each for each in found), found


def test_numbers_of_traffic_are_those_of_the_other_plan() -> None:
    (told,) = (
        each
        for each in advice(gradient_accumulation_steps=4, zero_optimization={"reduce_at": "micro_step"})
        if "boundary" in each
    )
    sent = [float(word) for word in told.split() if "." in word and word.replace(".", "").isdigit()]
    assert sent[0] == sent[1] == pytest.approx(4 * sent[2], rel=0.01)  # of gradients, in all, and at the boundary


def test_what_travels_several_times_is_the_gradients_alone() -> None:
    source = {**QUIET, "gradient_accumulation_steps": 4, "zero_optimization": {"stage": 2}}
    whole = case(source)
    (told,) = (each for each in advice_lines(whole) if each.startswith("With 4 micro-steps"))
    flows = {flow.what: flow.num_bytes for flow in whole.sizes.traffic.flows}
    assert f"4 times: {gib(flows['gradients, reduce-scatter'])} of the {gib(sum(flows.values()))} that" in told


def test_a_stage_that_needs_more_of_everything_is_not_called_worth_it() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 1_000_000_000}
    (told,) = (each for each in advice(world_size=2, zero_optimization=zero) if each.startswith("Stage 3 sends"))
    assert told.endswith("stage 2 is better in both.")


@pytest.mark.parametrize(("type_", "key"), [("WarmupLR", "warmup_min_lr"), ("WarmupCosineLR", ""), ("OneCycle", "")])
def test_the_key_that_is_named_belongs_to_the_schedule(type_: str, key: str) -> None:
    params = {"cycle_min_lr": 0.0, "cycle_max_lr": 1.0} if type_ == "OneCycle" else {"warmup_num_steps": 10}
    params |= {"total_num_steps": 100} if type_ == "WarmupCosineLR" else {}
    told = advice(scheduler={"type": type_, "params": params})[0]
    assert told.startswith("The first ")
    assert re.findall(r'"(warmup_\w+)"', told) == ([key] if key else [])


def test_a_plateau_has_no_rates_to_tell_of() -> None:
    assert advice(scheduler={"type": "ReduceLROnPlateau", "params": {}}) == []


def test_a_peak_that_is_asked_for_is_not_said_to_be_missed() -> None:
    params = {"total_num_steps": 100, "warmup_num_steps": 10, "exact_peak": True}
    assert not any("never reaches" in each for each in advice(scheduler={"type": "WarmupCosineLR", "params": params}))


def test_only_what_is_pinned_is_called_page_locked() -> None:
    zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    held = case({**QUIET, "zero_optimization": zero}).sizes.memory.elsewhere
    pinned = sum(size for owner, size in held.items() if owner.startswith("pinned"))
    assert 0 < pinned < sum(held.values())
    (told,) = (each for each in advice(zero_optimization=zero) if each.startswith("Offload needs"))
    assert f", {gib(8 * pinned)} of it page-locked" in told


def test_parameters_that_stay_whole_keep_to_their_sum() -> None:
    zero = {"stage": 3, "stage3_param_persistence_threshold": 1000, "stage3_model_persistence_threshold": 2000}
    told = [each for each in advice(zero_optimization=zero) if "stage3_param_persistence_threshold" in each]
    assert told[0].startswith("5 of 27 parameters")  # four of 256 elements and one of 768


def test_a_rank_alone_is_told_that_stages_are_alike() -> None:
    assert advice(world_size=1, zero_optimization={"stage": 2})[0].startswith("On one rank stage 2 shards nothing")


def test_notices_of_the_plan_come_last() -> None:
    assert advice(vocabulary_size=8)[-1].startswith("dict: vocabulary_size has no effect here")


GRID: dict[str, tuple[Any, ...]] = {
    "stage": (0, 1, 2, 3),
    "offload_optimizer": (None, None, "cpu", "nvme"),
    "offload_param": (None, None, "cpu"),
    "reduce_at": (None, None, "boundary", "micro_step"),
    "reduce_bucket_size": (None, None, 10**6, 5 * 10**8),
    "stage3_max_live_parameters": (None, 0, 10**7, 10**9, 10**13),
    "stage3_param_persistence_threshold": (None, 0, 10**6),
    "zero_hpz_partition_size": (None, None, 8),
    "zero_quantized_weights": (None, None, True),
    "zero_quantized_gradients": (None, None, True),
    "shard_group_size": (None, None, 8),
}
SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    *(
        {"type": type_, "params": {"total_num_steps": 900, "warmup_num_steps": 100, **more}}
        for type_ in ("WarmupDecayLR", "WarmupCosineLR")
        for more in ({}, {"warmup_type": "linear"}, {"exact_peak": True})
    ),
    {"type": "WarmupLR", "params": {"warmup_min_lr": 0.1}},
    {"type": "OneCycle", "params": {"cycle_min_lr": 0.0, "cycle_max_lr": 0.1}},
)


def drawn(seed: int) -> tuple[dict[str, Any], int, Shape]:
    """A config, a world and a model."""
    draw = random.Random(seed)
    zero = {key: value for key, values in GRID.items() if (value := draw.choice(values)) is not None}
    for part in ("offload_optimizer", "offload_param"):
        if part in zero:
            zero[part] = {"device": zero[part], "nvme_path": "/nvme"}
    source = {
        "train_micro_batch_size_per_gpu": draw.choice((1, 4)),
        "gradient_accumulation_steps": draw.choice((1, 1, 3, 16)),
        "optimizer": {"type": draw.choice(("Adam", "AdamW")), "params": {"lr": 0.001, "weight_decay": 0.1}},
        "scheduler": draw.choice(SCHEDULES),
        draw.choice(("bf16", "fp16")): {"enabled": draw.choice((True, False))},
        "tensor_parallel": {"autotp_size": draw.choice((1, 1, 2))},
        "zero_optimization": zero,
    }
    world_size = draw.choice((1, 2, 8, 64, 1024))
    numel = draw.choice((1e8, 1e8, 1e9, 1.3e9, 7e9, 1e12))
    return source, world_size, shape_of(numel, layers=12)  # few parameters, of any size: plans take little time


def figures_of(text: str) -> list[str]:
    """The sizes that a text names, as it writes them."""
    return re.findall(r"[0-9][0-9,]*\.[0-9]+ [GM]iB", text)


def claims(told: Advice, here: Case, there: Case) -> None:
    """What the text says of two plans, each made from its own config."""
    sent = re.search(r"sends (?:less, )?(\S+ [GM]iB)(?: instead of (\S+ [GM]iB))?", told.text)
    if sent is not None and not told.text.startswith("Stage 3 sends"):
        assert sent[1] == gib(there.sent_bytes)
        assert sent[2] in (None, gib(here.sent_bytes))
        if "instead" not in sent[0] or "gathers them again" not in told.text:
            assert there.sent_bytes < here.sent_bytes
    holds = re.search(r"holds (\S+ [GM]iB) (instead of|in place of) (\S+ [GM]iB)", told.text)
    if holds is not None:
        one, other = (there, here) if holds[2] == "instead of" else (here, there)
        assert (holds[1], holds[3]) == (gib(one.held_bytes), gib(other.held_bytes))
    if told.text.startswith("stage3_max_live_parameters"):
        assert there.held_bytes < here.held_bytes
        assert there.sent_bytes >= here.sent_bytes
    if told.text.startswith("Stage 3 sends"):
        assert here.sent_bytes >= there.sent_bytes
        assert ("worth it only" in told.text) is (here.held_bytes < there.held_bytes)
    if told.text.startswith("reduce_bucket_size"):
        assert there.held_bytes < here.held_bytes
        assert figures_of(told.text) == [gib(here.sizes.memory.buckets), gib(there.sizes.memory.buckets)]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_advised_comes_true_when_it_is_done(seed: int) -> None:
    """Each advice is carried out in the config, which is read, resolved and planned anew."""
    num_checked = 0
    for number in itertools.count():
        source, world_size, shape = drawn(1000 * seed + number)
        try:
            here = case(source, world_size, "cuda", shape)
        except ConfigError:
            continue
        for told in collect_advice(here):
            if told.changes:
                there = case(with_changes(source, told.changes), world_size, "cuda", shape)
                assert there.plan != attrs.evolve(here.plan, origins=there.plan.origins, given=there.plan.given), told
                claims(told, here, there)
                assert told.changes not in [each.changes for each in collect_advice(there)], told  # it is done
                num_checked += 1
        if num_checked >= 6:
            return
