"""Real steps in this process, and how near the plan comes to them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from zcomm.testing import end_ranks, run_ranks
from zengine.commands.plan import engine_starter
from zengine.config import Facts, load, resolve
from zengine.planning.measured import measure, single_process_plan
from zengine.planning.models import Shape, Transformer, token_batches
from zengine.planning.sizes import Workload, peak

SHAPE = Shape(layers=4, width=256, vocabulary=1000)  # few operations: without AVX-512, bf16 is 20 times slower


def make() -> nn.Module:
    return Transformer(SHAPE)


def _peaks(cases: list[tuple[int, bool, int]]) -> list[tuple[int, int]]:
    """(planned, measured) of each (micro-batch, bf16, accumulation), in a process of its own."""
    found = []
    for micro_batch, is_bf16, accumulation in cases:
        source = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": is_bf16},
        }
        plan = single_process_plan(resolve(load(source), Facts(world_size=8, replicas=8)))
        with torch.device("meta"):
            module = plan.precision.cast_module(make())
        plan.precision.cast_module(make())(token_batches(16)(micro_batch)).backward()  # kernels are compiled once
        subject = Workload(module=module, batch=token_batches(16), device="cpu")
        start = engine_starter(plan)
        measure(make, subject.batch, start, micro_batch=micro_batch, device="cpu")  # code is loaded once
        real = measure(make, subject.batch, start, micro_batch=micro_batch, device="cpu")
        found.append((peak(subject, plan, micro_batch, 1).total, real.peak))
        assert real.between_steps < real.peak
    return found


@pytest.fixture
def _own_process() -> Iterator[None]:
    """A fresh rank, ended afterwards: `measure` changes its malloc for good, which slows down every later test."""
    end_ranks()
    yield
    end_ranks()


@pytest.mark.usefixtures("_own_process")
def test_a_plan_comes_within_a_tenth_of_what_steps_take() -> None:
    (found,) = run_ranks(_peaks, 1, [(8, False, 1), (8, True, 2)])
    for planned, real in found:
        assert planned == pytest.approx(real, rel=0.1)


def test_alone_keeps_the_micro_steps_and_brings_an_optimizer() -> None:
    source = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    plan = single_process_plan(resolve(load(source), Facts(world_size=8, replicas=8)))
    assert (plan.batch.train_batch_size, plan.batch.replicas, plan.optimizer.type) == (6, 1, "AdamW")
