"""Transformers' Trainer and Accelerate's Accelerator, as released, train with zengine as their deepspeed.

Two CPU ranks, one launch for all checks (see hugging_face.py); tiny models with random weights, no hub.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from two_ranks import of, run

MISSING = [name for name in ("transformers", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (requirements-dev.txt has them)"
)

SCRIPT = Path(__file__).with_name("hugging_face.py")
STAGES = pytest.mark.parametrize("stage", [1, 2, 3])


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Results of each rank."""
    return run(SCRIPT, tmp_path_factory.mktemp("hugging_face"))


@STAGES
def test_trainer_has_the_losses_and_norms_of_a_run_without_deepspeed(found: list[dict[str, Any]], stage: int):
    plain, ours = of(found, "plain"), of(found, f"trainer-{stage}")
    assert plain["type"] == "DistributedDataParallel"
    assert (ours["type"], ours["stage"], ours["zero3"]) == ("DeepSpeedEngine", stage, stage == 3)
    assert ours["losses"] == pytest.approx(plain["losses"], abs=1e-4)
    assert ours["norms"] == pytest.approx(plain["norms"], rel=1e-4)
    assert found[1][f"trainer-{stage}"]["losses"] == ours["losses"]


@STAGES
def test_trainer_resumes_from_the_middle_with_the_losses_of_the_uninterrupted_run(
    found: list[dict[str, Any]], stage: int
):
    ours = of(found, f"trainer-{stage}")
    assert len(ours["resumed"]) == 2
    assert ours["resumed"] == ours["losses"][2:]
    assert 0 < ours["evaluated"] < 4


@STAGES
def test_trainer_exports_the_checkpoints_masters_equal_to_plain_training(found: list[dict[str, Any]], stage: int):
    exported = of(found, f"export-{stage}")
    assert exported["names"]
    assert exported["masters"]
    assert exported["apart"] < 1e-4


def test_a_model_may_be_constructed_directly_at_stage_3(found: list[dict[str, Any]]):
    ours = of(found, "constructed")
    assert ours["sharded"]
    assert ours["losses"][0] == pytest.approx(ours["expected"], abs=1e-5)
    assert ours["losses"][1] < ours["losses"][0]


def test_states_are_split_over_the_ranks(found: list[dict[str, Any]]):
    parts = [sum(results["trainer-3"]["parts"] for results in found)]
    assert 0 < parts[0] < 2 * 18432


def test_models_are_loaded_and_initialized_without_full_memory_at_stage_3(found: list[dict[str, Any]]):
    ours = of(found, "pretrained")
    assert (ours["nbytes"], ours["llama"]) == (4, 4)
    assert ours["same"]
    assert ours["kept"]
    assert ours["loaded"] == ours["copied"]
    assert len(ours["drawn"]) == len(ours["resized"]) == 4


def test_experts_are_sharded_in_models_loaded_and_initialized_without_full_memory(found: list[dict[str, Any]]):
    """Randomly initialized weights differ, because of Transformers."""
    ours = of(found, "experts")
    assert ours["loaded"] == pytest.approx(ours["plain"], abs=1e-4)
    assert len(ours["drawn"]) == 4
    assert ours["experts"] == [2, 4]
    assert ours["kept"]
    assert ours["names"]


def test_a_run_of_stage_1_is_resumed_at_stage_3_with_the_same_losses(found: list[dict[str, Any]]):
    ours = of(found, "across")
    assert ours["stage"] == 3
    assert ours["losses"] == pytest.approx(of(found, "trainer-1")["losses"][2:], abs=1e-6)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_listed_layers_stay_in_float32_and_the_model_runs(found: list[dict[str, Any]], half: str):
    ours = of(found, f"kept-{half}")
    assert {name.rpartition("DenseReluDense.")[2] for name in ours["t5"]["wide"]} == (
        {"wo.weight"} if half == "fp16" else set()
    )
    assert ours["llama"]["wide"] == []
    assert ours["llama"]["frequencies"]
    for model in ("t5", "llama"):
        assert ours[model]["losses"][-1] < ours[model]["losses"][0]


@STAGES
def test_accelerator_trains_saves_and_loads_equally_at_every_stage(found: list[dict[str, Any]], stage: int):
    ours, first = of(found, f"accelerate-{stage}"), of(found, "accelerate-1")
    assert (ours["ranks"], ours["type"], ours["unwrapped"]) == (2, "DistributedType.DEEPSPEED", "GPT2LMHeadModel")
    assert ours["losses"] == pytest.approx(first["losses"], abs=1e-6)
    assert ours["again"] == ours["losses"][4:]
    assert (ours["samples"], ours["skipped"], ours["names"]) == (32, False, 29)


def test_accelerator_with_sequence_parallelism_has_the_losses_of_one_process(found: list[dict[str, Any]]):
    ours = of(found, "shared")
    assert len(ours["losses"]) == 8
    assert ours["losses"] == pytest.approx(ours["plain"], rel=2e-4)


def test_trainer_with_tensor_parallelism_trains_saves_resumes_and_exports_equally(found: list[dict[str, Any]]):
    ours = of(found, "split")
    assert (ours["tensor"], ours["samples"]) == (2, 16)
    assert ours["losses"] == pytest.approx(ours["plain"], abs=1e-4)
    assert ours["norms"][1] == pytest.approx(ours["norms"][0], rel=1e-4)
    assert ours["resumed"] == ours["losses"][2:]
    assert found[1]["split"]["losses"] == ours["losses"]
    assert ours["apart"] < 1e-4


def test_deepspeed_was_ours(found: list[dict[str, Any]]):
    assert [results["deepspeed"] for results in found] == ["zengine.deepspeed", "zengine.deepspeed"]
