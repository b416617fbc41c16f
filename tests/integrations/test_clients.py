"""TRL's trainers, PEFT's adapters and Accelerate's own scripts, as released, train with zengine as their deepspeed.

Two CPU ranks, one launch for all checks (see clients.py); tiny models with random weights, no hub.  Losses and norms
are compared with the same trainer without DeepSpeed, which uses DistributedDataParallel.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from two_ranks import of, run

MISSING = [
    name
    for name in ("transformers", "accelerate", "trl", "peft", "datasets")
    if importlib.util.find_spec(name) is None
]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (requirements-dev.txt has them)"
)

SCRIPT = Path(__file__).with_name("clients.py")
STEPS = {
    **dict.fromkeys(("sft", "sft_lora", "dpo", "dpo_precomputed", "kto", "reward", "rloo"), 3),
    "grpo": 3,
    "grpo_sharded": 3,
    "grpo_lora": 3,
    "grpo_hybrid": 3,
    "grpo_reused": 6,
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return run(SCRIPT, tmp_path_factory.mktemp("clients"))


@pytest.mark.parametrize("trainer", STEPS)
def test_trl_trains_at_stages_2_and_3_as_without_deepspeed(found: list[dict[str, Any]], trainer: str):
    """Compare losses and norms, and rewards and divergences from the reference where a trainer has them."""
    ours = of(found, f"trl-{trainer}")
    engine = "DeepSpeedHybridEngine" if trainer == "grpo_hybrid" else "DeepSpeedEngine"
    assert [ours[f"type-{stage}"] for stage in (None, 2, 3)] == ["DistributedDataParallel", engine, engine]
    assert len(ours["None"]) == STEPS[trainer]
    for stage in ("2", "3"):
        for logged, plain in zip(ours[stage], ours["None"], strict=True):
            assert logged == pytest.approx(plain, rel=2e-4, abs=2e-5)


@pytest.mark.parametrize("adapter", ["lora", "whole_head", "prompt", "prefix"])
def test_peft_trains_saves_and_resumes_adapters_as_without_deepspeed(found: list[dict[str, Any]], adapter: str):
    ours = of(found, f"peft-{adapter}")
    for stage in ("2", "3"):
        assert ours[stage]["losses"] == pytest.approx(ours["None"]["losses"], abs=2e-5)
        assert ours[stage]["norms"] == pytest.approx(ours["None"]["norms"], rel=2e-4)
        assert ours[stage]["resumed"] == ours[stage]["losses"][2:]
        assert ours[stage]["names"]
        assert ours[stage]["apart"] < 1e-4


@pytest.mark.parametrize("stage", ["2", "3"])
def test_adapters_are_merged_into_weights_and_taken_out_again(found: list[dict[str, Any]], stage: str):
    ours = of(found, "peft-lora")[stage]
    assert max(ours["merged"], ours["unmerged"], ours["unloaded"]) < 1e-5


@pytest.mark.parametrize("low", [False, True])
def test_saved_adapters_are_loaded_onto_a_sharded_model(found: list[dict[str, Any]], low: bool):
    ours = of(found, "peft-loaded")
    assert ours[f"sharded-{low}"] == pytest.approx(ours[f"plain-{low}"], abs=2e-5)


@pytest.mark.parametrize("stage", ["2", "3"])
def test_trainer_trains_with_the_published_configs_as_without_deepspeed(found: list[dict[str, Any]], stage: str):
    ours = of(found, "published-train")
    assert len(ours[stage]) == 4
    assert ours[stage] == pytest.approx(ours["None"], abs=2e-5)


@pytest.mark.parametrize("half", ["fp16", "bf16"])
def test_trainer_resumes_the_published_configs_and_loads_the_best_model(found: list[dict[str, Any]], half: str):
    ours = of(found, "published-resume")[half]
    assert len(ours["resumed"]) == 2
    assert ours["resumed"] == ours["losses"][2:]
    assert ours["best"] == pytest.approx(ours["metric"], abs=1e-6)


def test_trainer_evaluates_and_predicts_at_stage_3_without_training(found: list[dict[str, Any]]):
    ours = of(found, "published-evaluate")
    assert ours["3"] == pytest.approx(ours["None"], rel=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["option", "file"])
def test_accelerates_scripts_train_save_and_resume(found: list[dict[str, Any]], stage: int, way: str):
    """The scripts themselves check that schedule, learning rate and accuracy are those of the saved run."""
    ours = of(found, f"accelerate-scripts-{stage}")[way]
    assert ours["resumed"] == ours["saved"]
    assert len(ours["trained"]) == 2
    assert ours["files"] == ["model.safetensors"]


def test_accelerates_script_trains_with_several_plugins(found: list[dict[str, Any]]):
    """One model trains beside another that is evaluated; then two train, at stages 2 and 3."""
    assert len(of(found, "accelerate-several")["accuracies"]) == 6


def test_deepspeed_was_ours(found: list[dict[str, Any]]):
    assert [results["deepspeed"] for results in found] == ["zengine.deepspeed", "zengine.deepspeed"]
