"""The peak of a rank, the largest micro-batch that fits, and the stage that sends least."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zengine.config import Facts, Plan, load, resolve
from zengine.planning.models import Shape, Transformer, token_batches
from zengine.planning.sizes import Workload, best_fit, fit_stages, largest_micro_batch, peak


def plan_of(**source: Any) -> Plan:
    return resolve(
        load({"train_batch_size": 96, "gradient_accumulation_steps": 1, **source}), Facts(world_size=4, replicas=4)
    )


@pytest.fixture(scope="module")
def subject() -> Workload:
    with torch.device("meta"):
        model = Transformer(Shape(layers=2, width=64, vocabulary=300))
    return Workload(module=model, batch=token_batches(32), device="cpu")


def test_a_peak_is_what_is_held_and_the_activations(subject: Workload) -> None:
    found = peak(subject, plan_of(), 2, 4)
    assert found.total == found.sizes.memory.total_bytes + found.activations.peak
    assert found.between_steps < found.total
    assert peak(subject, plan_of(), 4, 4).total > found.total


def test_the_largest_micro_batch_fits_and_a_slightly_larger_one_does_not(subject: Workload) -> None:
    room = peak(subject, plan_of(), 37, 4).total
    found = largest_micro_batch(subject, plan_of(), 4, room)
    assert found <= 37 <= found * 1.06
    assert peak(subject, plan_of(), found, 4).total <= room
    assert largest_micro_batch(subject, plan_of(), 4, room // 100) == 0


def test_every_stage_keeps_the_batch_and_the_best_sends_least(subject: Workload) -> None:
    room = peak(subject, plan_of(), 7, 4).total  # stage 0 with 7 samples
    found = list(fit_stages(subject, plan_of(), 4, room))
    assert [each.stage for each in found] == [0, 1, 2, 3]
    for each in found:
        assert each.peak is not None
        batch = each.peak.plan.batch
        assert batch.micro_batch_size * batch.accumulation * 4 == 96
        assert batch.micro_batch_size <= each.largest
        assert each.peak.total <= room
    assert found[0].largest == 7
    best = best_fit(found)
    assert best is not None
    assert best[1].sizes.traffic.total_bytes == min(e.peak.sizes.traffic.total_bytes for e in found if e.peak)
    assert best_fit(fit_stages(subject, plan_of(), 4, 1000)) is None
