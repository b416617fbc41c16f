"""Samples whose tokens are shared out: what it means for batches, and what does not go with it."""

from __future__ import annotations

from typing import Any

import pytest

from zcomm import Degrees
from zengine.config import ConfigError, Facts, Plan, load, resolve

FACTS = Facts(world_size=4, replicas=4)
SEQLEN = {
    "enabled": True,
    "min_difficulty": 8,
    "max_difficulty": 64,
    "schedule_type": "fixed_linear",
    "schedule_config": {"total_curriculum_step": 10, "difficulty_step": 8},
}


def plan_of(**source: Any) -> Plan:
    return resolve(load({"train_micro_batch_size_per_gpu": 2, **source}), FACTS)


def test_sequence_ranks_see_the_same_samples_and_sum_gradients() -> None:
    plan = plan_of(sequence_parallel_size=2)
    assert plan.parallel.degrees == Degrees(shard=2, sequence=2)
    assert (plan.batch.replicas, plan.batch.train_batch_size, plan.parallel.gradient_ranks) == (2, 4, 4)
    assert plan["sequence_parallel_size"] == 2


def test_sections_that_cut_whole_sequences_are_refused_where_ranks_have_pieces() -> None:
    assert plan_of(curriculum_learning=SEQLEN).data.seqlen
    with pytest.raises(ConfigError, match=r"curriculum_learning\.enabled = true: .* each of 2 ranks has a part"):
        plan_of(curriculum_learning=SEQLEN, sequence_parallel_size=2)


def test_a_size_that_does_not_divide_the_ranks_is_told_with_the_numbers() -> None:
    with pytest.raises(
        ConfigError, match=r"sequence_parallel_size = 3: .* sequence 3 .* does not divide the 4 ranks"
    ):
        plan_of(sequence_parallel_size=3)
