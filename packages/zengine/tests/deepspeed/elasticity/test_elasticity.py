"""`deepspeed.elasticity`: what schedulers of jobs and DeepSpeed's own tests call."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zengine import deepspeed
from zengine.config import ConfigError
from zengine.deepspeed.elasticity import compute_elastic_config, elasticity_enabled, ensure_immutable_elastic_config
from zengine.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from zengine.deepspeed.elasticity.show import main

SECTION = {
    "enabled": True,
    "max_train_batch_size": 10000,
    "micro_batch_sizes": [8, 12, 16, 17],
    "min_gpus": 32,
    "max_gpus": 1500,
    "min_time": 20,
    "version": 0.1,
}


def config(**changes: Any) -> dict[str, Any]:
    return {"elasticity": {**SECTION, **changes}}


def test_the_batch_and_its_worlds() -> None:
    batch, worlds = compute_elastic_config(config(), deepspeed.__version__)
    assert batch == 9792
    assert len(worlds) == 23
    for world in worlds:
        assert any((batch // world) % micro == 0 for micro in SECTION["micro_batch_sizes"])
    assert compute_elastic_config(config(), deepspeed.__version__, world_size=64)[2] == 17
    assert elasticity_enabled(config())
    assert not elasticity_enabled({})


def test_version_0_2_takes_the_world_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"version": 0.2, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4, 6], "num_gpus_per_node": 8}
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(ElasticityConfigError, match="set WORLD_SIZE, which is not set"):
        compute_elastic_config(config(**changes), deepspeed.__version__)
    monkeypatch.setenv("WORLD_SIZE", "64")
    batch, worlds, micro = compute_elastic_config(config(**changes), deepspeed.__version__, return_microbatch=True)
    assert (batch, 64 in worlds, micro) == (1920, True, 6)
    split = config(**changes, model_parallel_size=4)
    assert compute_elastic_config(split, deepspeed.__version__, world_size=64)[1][:3] == [8, 10, 12]


@pytest.mark.parametrize(
    ("given", "world", "error", "message"),
    [
        ({}, 0, ElasticityConfigError, '"elasticity" is missing'),
        (config(enabled=False), 0, ElasticityConfigError, 'Set "enabled": true'),
        (config(version=0.3), 0, ElasticityConfigError, "there are 0.1 and 0.2"),
        (config(model_parallel_size=2), 0, ElasticityConfigError, "needs version 0.2"),
        (config(micro_batch_sizes=[0, 2]), 0, ElasticityConfigError, "a list of whole numbers >= 1"),
        (config(micro_batch_sizes=5), 0, ElasticityConfigError, "a list of whole numbers >= 1"),
        (config(min_gpus=0), 0, ElasticityConfigError, "min_gpus = 0: needs at least 1"),
        (config(min_gpus=9, max_gpus=8), 0, ElasticityConfigError, "exchange the two"),
        (config(), 128, ElasticityIncompatibleWorldSize, r"World size \(128\) is not valid"),
        (config(max_train_batch_size=4), 0, ValueError, "at most the batch size 4"),
    ],
)
def test_mistakes(given: dict[str, Any], world: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compute_elastic_config(given, deepspeed.__version__, world_size=world)


def test_an_old_target_and_a_missing_key() -> None:
    with pytest.raises(ElasticityError, match=r"the first version with it is 0\.3\.8"):
        compute_elastic_config(config(), "0.2")
    with pytest.raises(ElasticityConfigError, match="max_train_batch_size is missing"):
        ElasticityConfig({"enabled": True, "micro_batch_sizes": [2]})
    with pytest.raises(ValueError, match="must be a dict, and it is str"):
        compute_elastic_config("config.json", deepspeed.__version__)  # type: ignore[arg-type]


def test_a_section_that_differs_from_the_schedulers_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps(SECTION))
    ensure_immutable_elastic_config(SECTION)
    with pytest.raises(ElasticityConfigError, match=r"max_acceptable_batch_size is 9 in this config and 10000 in"):
        ensure_immutable_elastic_config({**SECTION, "max_train_batch_size": 9})


@pytest.mark.parametrize("text", ["{micro", "[1]"])
def test_a_schedulers_section_that_is_no_json_object_is_told(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", text)
    with pytest.raises(ElasticityConfigError, match="DEEPSPEED_ELASTICITY_CONFIG"):
        ensure_immutable_elastic_config(SECTION)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("micro_batch_sizes", []),
        ("min_gpus", "a"),
        ("max_gpus", None),
        ("max_train_batch_size", "2000"),
        ("max_train_batch_size", -5),
        ("prefer_larger_batch", "yes"),
        ("version", "newest"),
    ],
)
def test_values_of_other_types_are_errors_of_the_section(key: str, value: Any) -> None:
    with pytest.raises(ElasticityConfigError, match=rf"elasticity\.{key} = "):
        compute_elastic_config(config(**{key: value}), deepspeed.__version__)


def test_initialize_raises_the_errors_of_elasticity() -> None:
    section = {"enabled": True, "max_train_batch_size": 4, "micro_batch_sizes": [1, 2, 3, 4], "version": 0.1}
    given = {"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(ElasticityConfigError, match="elasticity chooses the batch sizes") as found:
        deepspeed.initialize(model=nn.Linear(2, 1), config={**given, "train_batch_size": 2})
    assert isinstance(found.value, ConfigError)
    with pytest.raises(ElasticityConfigError, match="micro_batch_sizes"):
        deepspeed.initialize(model=nn.Linear(2, 1), config={"elasticity": {**section, "micro_batch_sizes": [-1]}})
    with pytest.raises(ElasticityIncompatibleWorldSize, match="1 replicas cannot train") as world:
        deepspeed.initialize(model=nn.Linear(2, 1), config={**given, "elasticity": {**section, "min_gpus": 2}})
    assert pickle.loads(pickle.dumps(world.value)).problems == world.value.problems
    with pytest.raises(ConfigError) as other:
        deepspeed.initialize(model=nn.Linear(2, 1), config={**given, "train_batch_size": 2, "bf17": {}})
    assert not isinstance(other.value, ElasticityError)


def test_an_engine_trains_the_elastic_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    section = {"enabled": True, "max_train_batch_size": 64, "micro_batch_sizes": [4], "version": 0.1}
    given = {"elasticity": section, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 1), config=given)
    assert engine.get_batch_info() == (48, 4, 12)
    assert engine.elasticity_enabled()
    for _ in range(12):
        engine.backward(engine(torch.ones(4, 2)).mean())
        engine.step()
    assert engine.global_steps == 1
    engine.close()
    monkeypatch.setenv("DEEPSPEED_ELASTICITY_CONFIG", json.dumps({**section, "max_train_batch_size": 128}))
    with pytest.raises(ElasticityConfigError, match="Start the job with the same config"):
        deepspeed.initialize(model=nn.Linear(2, 1), config=given)


def test_the_command_prints_the_worlds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config()))
    assert main(["-c", str(path), "-w", "64"]) == 0
    printed = capsys.readouterr().out
    assert "final_batch_size .... 9792" in printed
    assert "micro_batch_size .... 17" in printed
    assert "gradient_accumulation_steps .... 9" in printed
    assert main(["-c", str(path), "-w", "7"]) == 2
    assert "World size (7) is not valid" in capsys.readouterr().err
