"""Copies of the weights for rollouts: split over tensor ranks, quantized, made unit by unit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, VOCABULARY, Block, TinyLM, engine_of, train
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.config import ConfigError
from zengine.inference.quantized import projections
from zengine.rollout import RolloutConfig, SamplingConfig

SAMPLING = SamplingConfig(max_new_tokens=9)


def hybrid(size: int) -> dict[str, Any]:
    return {"enabled": True, "max_out_tokens": 40, "inference_tp_size": size}


def model_of(with_adapters: bool, is_tied: bool = False) -> TinyLM:
    model = TinyLM()
    if is_tied:
        model.head.weight = model.tokens.weight
    if with_adapters:
        add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v", "shrink"]))
    return model


def tensors_of(decoder: Any) -> list[Tensor]:
    """Return the weights of a decoder's projections, and its embedding."""
    return [decoder.embedding.tokens, *(each.weight for each in projections(decoder))]


def _split(stage: int, size: int, with_adapters: bool, is_tied: bool) -> dict[str, Any]:
    engine = engine_of(stage, model_of(with_adapters, is_tied), hybrid_engine=hybrid(size))
    train(engine, 2)
    prompts = [[*prompt, engine.global_rank] for prompt in PROMPTS[: 3 - engine.global_rank % 2]]
    config = RolloutConfig(compare=9, num_slots=4)
    rollout = engine.rollout(prompts, n=2, sampling=SAMPLING, seed=1, config=config)
    weights, tokens = engine._rollouts.weights, []
    with weights.open(holds_all=False):
        decoder = weights.steps(1).decoder
        tokens = zcomm.all_gather_object([sample.tokens for sample in rollout.samples])
    pending, parts = engine.begin_rollout(prompts, n=2, sampling=SAMPLING, seed=1), 1
    while (later := pending.run(max_steps=5 if size > 1 else 0)) is None:
        parts += 1
    losses = train(engine, 2)
    found = {
        "prompts": [sample.prompt[:-1] for sample in rollout.samples],
        "samples": rollout.samples,
        "later": later.samples,
        "parts": parts,
        "stats": rollout.stats,
        "heads": decoder.blocks[0].attention.num_heads,
        "numel": sum({each.data_ptr(): each.numel() for each in tensors_of(decoder)}.values()),
        "ranks": len({str(each) for each in tokens}),
        "losses": losses,
    }
    engine.close()
    return found


@pytest.mark.parametrize(("stage", "with_adapters", "is_tied"), [(0, False, True), (2, True, False), (3, True, True)])
def test_ranks_of_a_split_have_the_samples_of_whole_weights(stage: int, with_adapters: bool, is_tied: bool) -> None:
    split = run_ranks(_split, 2, stage, 2, with_adapters, is_tied)
    whole = run_ranks(_split, 2, stage, 1, with_adapters, is_tied)
    for rank, (one, other) in enumerate(zip(split, whole)):
        assert one["prompts"] == [tuple(prompt) for prompt in PROMPTS[: 3 - rank] for _ in "ab"]
        assert [(each.prompt, each.tokens) for each in one["samples"]] == [
            (each.prompt, each.tokens) for each in other["samples"]
        ]
        assert one["later"] == one["samples"]
        assert one["parts"] > 1
        assert one["stats"].max_delta_log_prob < 1e-5
        assert 0 <= one["stats"].kl < 1e-9
        assert (one["heads"], other["heads"]) == (1, 2)
        assert one["losses"] == other["losses"]  # training is undisturbed
    sizes = [one["numel"] for one in split]
    assert max(sizes) <= 0.5 * whole[0]["numel"] + VOCABULARY * 16 / 2  # 29 tokens do not halve


def test_two_groups_of_a_world_are_split_alike() -> None:
    split, whole = (run_ranks(_split, 4, 3, size, False, False) for size in (2, 1))
    for one, other in zip(split, whole):
        assert [each.tokens for each in one["samples"]] == [each.tokens for each in other["samples"]]
        assert one["stats"].max_delta_log_prob < 1e-5


def _peak(size: int, format: str) -> tuple[int, int, list[str]]:
    """Return the most elements gathered by a later rollout, those of the largest unit, and the collectives."""
    engine = engine_of(3, model_of(True), hybrid_engine=hybrid(size))
    train(engine, 1)
    config, log = RolloutConfig(compare=0, quantize=format), list[zcomm.Record]()
    first = engine.rollout(PROMPTS, n=1, sampling=SAMPLING, seed=1, config=config)  # recognizes the decoder
    unsharder, weights = engine.parts.partition.unsharder, engine._rollouts.weights
    unsharder.peak_numel = 0
    with zcomm.traced(log), weights.open(holds_all=False):
        weights.steps(1, format)
    numel = max(unit.numel for unit in unsharder.units.values())
    peak, names = unsharder.peak_numel, [record.op for record in log]
    assert engine.rollout(PROMPTS, n=1, sampling=SAMPLING, seed=1, config=config).samples == first.samples
    storages = sum(len(unit.storages) for unit in unsharder.units.values())
    assert len(names) == storages  # each once
    engine.close()
    return peak, numel, sorted(set(names))


@pytest.mark.parametrize(("size", "format"), [(2, ""), (1, "int8"), (2, "int8")])
def test_a_copy_is_made_with_one_unit_at_a_time(size: int, format: str) -> None:
    for peak, numel, names in run_ranks(_peak, 2, size, format):
        assert names == ["all_gather"]
        assert peak == numel  # one unit


def _first_peak() -> tuple[int, int]:
    """Return the most elements gathered by the first rollout, and those of the model."""
    model: Any = model_of(False)
    model.blocks.extend(Block() for _ in range(8))
    zero = {"stage": 3, "stage3_unit_size": 100, "stage3_param_persistence_threshold": 0}
    few = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
    engine = engine_of(3, model, hybrid_engine=hybrid(2), zero_optimization={**zero, **few})
    engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(compare=0))
    unsharder = engine.parts.partition.unsharder
    peak, numel = unsharder.peak_numel, sum(unit.numel for unit in unsharder.units.values())
    engine.close()
    return peak, numel


def test_the_first_rollout_of_a_split_holds_a_part_of_the_model_at_a_time() -> None:
    """Its decoder is recognized and verified without the whole model."""
    for peak, numel in run_ranks(_first_peak, 2):
        assert 0 < peak < numel / 2


def _quantized(stage: int, format: str) -> Any:
    engine = engine_of(stage, model_of(True))
    train(engine, 1)
    rollout = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, config=RolloutConfig(quantize=format, compare=2))
    engine.close()
    return rollout


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_a_quantized_copy_is_the_same_at_every_stage(format: str) -> None:
    (alone,) = run_ranks(_quantized, 1, 0, format)
    for stage in (0, 3):
        for found in run_ranks(_quantized, 1, stage, format):
            assert found.samples == alone.samples
            assert 0 < found.stats.kl < 0.05


def test_a_split_that_does_not_divide_the_ranks_is_told_by_numbers() -> None:
    with pytest.raises(ConfigError, match=r"inference_tp_size = 2: it does not divide the 1 ranks"):
        engine_of(hybrid_engine=hybrid(2))


def _many_heads() -> str:
    engine = engine_of(3, hybrid_engine=hybrid(4))
    with pytest.raises(ValueError) as caught:
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING)
    with pytest.raises(ValueError, match=r"exact=True\) needs whole weights, and .* is 4"):
        engine.rollout(PROMPTS, n=1, sampling=SAMPLING, config=RolloutConfig(exact=True))
    train(engine, 1)
    engine.close()
    return str(caught.value)


def test_heads_that_do_not_divide_and_exact_rollouts_are_told() -> None:
    for text in run_ranks(_many_heads, 4):
        assert text.startswith("blocks.0 has 2 attention heads, which hybrid_engine.inference_tp_size = 4 does not")


def _other_slots() -> str:
    engine = engine_of(0, hybrid_engine=hybrid(2))
    with pytest.raises(ValueError) as caught:
        engine.rollout(PROMPTS, sampling=SAMPLING, config=RolloutConfig(num_slots=2 + engine.global_rank))
    engine.close()
    return str(caught.value)


def test_ranks_that_differ_are_told_with_both_values() -> None:
    for text in run_ranks(_other_slots, 2):
        assert "rank 1 has {'num_slots': 3," in text
        assert "rank 0 {'num_slots': 2," in text


def test_a_split_copy_of_bf16_weights_is_near() -> None:
    for found in run_ranks(_bf16, 2):
        assert found.kl < 1e-3
        assert found.max_delta_log_prob < 0.1


def _bf16() -> Any:
    engine = engine_of(3, bf16={"enabled": True}, hybrid_engine=hybrid(2))
    train(engine, 1)
    assert torch.bfloat16 in {param.dtype for param in engine.module.parameters()}
    stats = engine.rollout(PROMPTS, n=1, sampling=SAMPLING).stats
    engine.close()
    return stats
