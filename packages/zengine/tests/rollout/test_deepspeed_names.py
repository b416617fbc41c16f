"""The hybrid engine under DeepSpeed's names: its parameters have ZeRO's marks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_lm import PROMPTS, TinyLM, config, train
from torch import nn

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.adapters import LoRAConfig, add_lora
from zengine.rollout import SamplingConfig
from zprecision.backends import native

SAMPLING = SamplingConfig(max_new_tokens=5)


def engine_of(stage: int, **changes: Any) -> Any:
    model = TinyLM()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **changes))[0]


def _fused(stage: int, dtype: str) -> list[Any]:
    engine = engine_of(stage, **({dtype: {"enabled": True}} if dtype else {}))
    assert all(hasattr(param, "ds_id") == (stage == 3) for param in engine.module.parameters())
    found = []
    for steps in (0, 2):
        train(engine, steps)
        samples = engine.rollout(PROMPTS, n=2, sampling=SAMPLING, seed=1).samples
        with engine._rollouts.weights.open():
            report = engine._rollouts.weights.steps(2).fused
        assert report.reasons == {}
        assert report.fused == ("blocks.0", "blocks.1", "head")
        found.append([(each.tokens, each.log_probs) for each in samples])
    engine.close()
    return found


@pytest.mark.skipif(native.library() is None, reason="the kernels are not built")
@pytest.mark.parametrize("dtype", ["", "bf16"])
def test_marked_weights_of_stage_3_are_decoded_by_the_fused_kernels(dtype: str) -> None:
    (expected,) = run_ranks(_fused, 1, 2, dtype)
    for world in (1, 2):
        assert run_ranks(_fused, world, 3, dtype)[0][0] == expected[0], world


def test_names_of_deepspeeds_hybrid_engine() -> None:
    model = TinyLM()
    add_lora(model, LoRAConfig(lora_r=2, target_mods=["q", "v"]))
    engine = deepspeed.initialize(model=model, model_parameters=trained(model), config=config(2))[0]
    train(engine, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ids = torch.tensor([PROMPTS[2], PROMPTS[2][::-1]])
    expected = engine(ids)
    assert engine._total_batch_size is None
    for fuse, unfuse in (
        (engine.fuse_lora_weight, engine.unfuse_lora_weight),
        (engine.fuse_lora_weight, engine.unfuse_lora_weight_non_pinned),
    ):
        fuse()
        engine.retake_inference_cache()
        assert torch.equal(engine(ids), expected)
        assert int(engine.generate(ids, max_new_tokens=1)[1, -1]) == int(expected[1, -1].argmax())
        unfuse()
        assert torch.equal(engine(ids), expected)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert engine._total_batch_size == 2
    engine.generate(ids[:1], max_new_tokens=1)
    assert engine._total_batch_size == 1  # of the last call, not of the first
    assert engine._generate_latency > 0.0
    assert engine._gather_latency > 0.0
    assert (engine.is_lora_fused, engine.Z3_enabled, engine.gather_all_layers) == (False, False, True)
    for name, advice in (
        ("layer_params", r"use engine\.module\.parameters\(\)"),
        ("prepare_shared_prefill", r"engine\.rollout\(prompts, n=8\) computes each prompt once"),
        ("create_inference_module", "replaces no layer; leave it out"),
        ("_training_latency", "wall_clock_breakdown"),
    ):
        assert not hasattr(engine, name)
        with pytest.raises(AttributeError, match=f"DeepSpeed's {name} is not here: .*{advice}"):
            getattr(engine, name)
    with pytest.raises(AttributeError, match=r"neither the engine nor its module \(TinyLM\) has .* 'absent'"):
        _ = engine.absent
    engine.close()


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def test_every_public_name_of_deepspeeds_is_there_or_says_what_to_use() -> None:
    """The names of deepspeed 0.19.8, runtime/hybrid_engine.py."""
    methods = """convert_to_linear_transposed new_inference_container populate_all_inference_policies fuse_lora_weight
        unfuse_lora_weight unfuse_lora_weight_non_pinned retake_inference_cache prepare_shared_prefill
        repeat_shared_prefill_cache generate create_inference_containers create_inference_module eval train step"""
    attributes = """Z3_enabled gather_all_layers is_lora_fused workspace inference_policies layer_params lora_params
        all_lora_params layer_lora_params all_layers_params mp_group mp_replace inference_mp_group _total_batch_size
        _generate_latency _gather_latency _training_latency _total_latency _iters"""
    engine = engine_of(0)
    for name in (*methods.split(), *attributes.split()):
        if not hasattr(engine, name):
            with pytest.raises(AttributeError, match=f"DeepSpeed's {name} is not here: "):
                getattr(engine, name)
    engine.close()
