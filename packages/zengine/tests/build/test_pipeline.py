"""Checks of a PipelineModule against a config."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import nn

import zengine
from zengine.build.pipeline import check_pipeline, fit_plan, pipeline_axes
from zengine.config import ConfigError, Facts, Plan, load, resolve
from zpartition import ReduceAt
from zpartition.pipeline import PipelineModule


def module(**options: Any) -> PipelineModule:
    return PipelineModule([nn.Linear(2, 2) for _ in range(4)], num_stages=1, **options)


def plan_of(model: nn.Module, accumulation: int = 1, **others: Any) -> Plan:
    source = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": accumulation, **others}
    ranks = others.get("pipeline", {}).get("stages", 1) if not pipeline_axes(model) else 1
    facts = Facts(world_size=ranks, replicas=ranks, axes=pipeline_axes(model), axes_source="the model")
    return resolve(load(source), facts)


def test_gradients_of_a_pipeline_are_reduced_once_a_batch() -> None:
    model = module()
    plan = fit_plan(
        model, plan_of(model, pipeline={"activation_checkpoint_interval": 2}, zero_optimization={"stage": 3})
    )
    assert plan.zero.reduce_at is ReduceAt.BATCH
    assert model.recompute_interval == 2
    plain = nn.Linear(2, 2)
    assert pipeline_axes(plain) == {}
    assert fit_plan(plain, plan_of(plain)).zero.reduce_at is ReduceAt.MICRO_STEP


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (
            {"partition": "best"},
            r"pipeline\.partition = \"best\": the PipelineModule was made with partition_method='par",
        ),
    ],
)
def test_what_the_module_is_not_is_refused(pipeline: dict[str, Any], message: str) -> None:
    model = module()
    with pytest.raises(ConfigError, match=message):
        fit_plan(model, plan_of(model, pipeline=pipeline))
    same = module(partition_method="best", seed_layers=True)
    fit_plan(same, plan_of(same, pipeline={**pipeline}))


def test_another_seeding_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed's own configs have the key with modules that are made without it."""
    model = module()
    fit_plan(model, plan_of(model, pipeline={"seed_layers": True}))
    assert "pipeline.seed_layers = true: no effect" in caplog.text


def test_a_schedule_that_does_not_take_the_micro_batches_is_refused_before_anything() -> None:
    model = module(stages_per_rank=2)
    fit_plan(model, plan_of(model))  # two stages of one rank are interleaved
    with pytest.raises(
        ConfigError, match=r'schedule = "gpipe": .*one stage a rank, not 2.*gradient_accumulation_steps'
    ):
        fit_plan(model, plan_of(model, pipeline={"schedule": "gpipe"}))


def test_stages_of_a_model_that_has_none() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"pipeline\.stages = 2: the model is a Linear.*PipelineModule\(layers, num_st"
    ):
        fit_plan(plain, plan_of(plain, pipeline={"stages": 2}))


def test_keys_for_a_model_without_stages_say_so(caplog: pytest.LogCaptureFixture) -> None:
    plain = nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, "zengine"):
        fit_plan(plain, plan_of(plain, pipeline={"schedule": "gpipe"}))
    assert caplog.messages == ["pipeline.schedule: no effect, since the model is not a PipelineModule"]


def test_they_say_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """The rules are checked before there are ranks and again with them; words are for once."""
    config = {"train_micro_batch_size_per_gpu": 2, "pipeline": {"schedule": "gpipe"}}
    with caplog.at_level(logging.WARNING, "zengine"):
        zengine.initialize(model=nn.Linear(2, 2), config=config)[0].close()
    assert [text for text in caplog.messages if text.startswith("pipeline.schedule")] == [
        "pipeline.schedule: no effect, since the model is not a PipelineModule"
    ]


def test_a_check_leaves_the_module_as_it_is() -> None:
    model = module()
    check_pipeline(model, plan_of(model, pipeline={"activation_checkpoint_interval": 2}))
    assert model.recompute_interval == 0
