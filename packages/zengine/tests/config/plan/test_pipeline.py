"""The section `pipeline`: what it plans, and what does not go with pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from zengine.config import ConfigError, Facts, Plan, load, resolve
from zengine.config.keys.parallel import Pipeline
from zengine.config.plan.fit_model import check_pipeline_keys

TWO_STAGES = Facts(world_size=4, replicas=2, axes={"pipeline": 2}, axes_source="the model")


def plan_of(pipeline: dict[str, Any], facts: Facts = TWO_STAGES, **others: Any) -> Plan:
    return resolve(load({"train_micro_batch_size_per_gpu": 2, "pipeline": pipeline, **others}), facts)


def test_the_section_is_a_value() -> None:
    assert plan_of({}).pipeline == Pipeline()
    section = {"stages": 2, "partition": "uniform", "seed_layers": True, "activation_checkpoint_interval": 3}
    plan = plan_of({**section, "schedule": "zero_bubble"})
    assert plan.pipeline == Pipeline(
        schedule="zero_bubble", stages=2, partition="uniform", seed_layers=True, activation_checkpoint_interval=3
    )
    assert all(plan[f"pipeline.{key}"] == value for key, value in section.items())
    assert (plan.parallel.degrees.pipeline, plan.batch.replicas) == (2, 2)


@pytest.mark.parametrize("stages", ["auto", 0])
def test_auto_is_what_the_module_has(stages: object) -> None:
    assert plan_of({"stages": stages}).parallel.degrees.pipeline == 2


def test_other_numbers_of_stages_are_refused_with_both() -> None:
    with pytest.raises(ConfigError, match=r"pipeline\.stages = 4: the model has 2 pipeline ranks for each copy"):
        plan_of({"stages": 4})
    with pytest.raises(ConfigError, match=r"takes pipeline 3 x .* which does not divide the 4 ranks"):
        plan_of({"stages": 3}, Facts(world_size=4, replicas=4))


def test_what_reads_one_forward_at_a_time_is_named() -> None:
    assert check_pipeline_keys(plan_of({})) == []
    problems = check_pipeline_keys(plan_of({}, timers={"throughput": {"count_flops_at": 3}}))
    assert [problem.key for problem in problems] == ["timers.throughput.count_flops_at"]


def test_keys_about_messages_say_that_they_have_no_effect() -> None:
    notices = plan_of({"use_reentrant": False}).notices
    assert [notice.split(":")[0] for notice in notices if "pipeline" in notice] != []
    notices = plan_of({"pipe_partitioned": True, "grad_partitioned": True}).notices
    assert (
        "dict: pipeline.pipe_partitioned, pipeline.grad_partitioned have no effect here: layers are not split"
        in notices
    )
    assert not [notice for notice in plan_of({"pipe_partitioned": False}).notices if "pipe_" in notice]
