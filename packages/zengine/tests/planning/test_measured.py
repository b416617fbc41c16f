"""Real steps in this process, and how near the plan comes to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zcomm.testing import run_ranks
from zengine.config import Facts, load, resolve
from zengine.planning.measured import engine_starter, measure, single_process_plan
from zengine.planning.models import Shape, Transformer, token_batches
from zengine.planning.sizes import Workload, peak

SHAPE = Shape(layers=2, width=512, vocabulary=3000)


def make() -> nn.Module:
    return Transformer(SHAPE)


def _peaks(cases: list[tuple[int, bool, int]]) -> list[tuple[int, int]]:
    """(planned, measured) of each (micro-batch, bf16, accumulation), in a process of its own."""
    found = []
    torch.ones(64, 64, requires_grad=True).matmul(
        torch.ones(64, 64)
    ).sum().backward()  # threads and kernels are there
    for micro_batch, is_bf16, accumulation in cases:
        source = {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "bf16": {"enabled": is_bf16},
        }
        plan = single_process_plan(resolve(load(source), Facts(world_size=8, replicas=8)))
        with torch.device("meta"):
            module = plan.precision.cast_module(make())
        subject = Workload(module=module, batch=token_batches(64), device="cpu")
        real = measure(make, subject.batch, engine_starter(plan), micro_batch=micro_batch, device="cpu")
        found.append((peak(subject, plan, micro_batch, 1).total, real.peak))
        assert real.between_steps < real.peak
    return found


def test_a_plan_comes_within_a_tenth_of_what_steps_take() -> None:
    (found,) = run_ranks(_peaks, 1, [(4, False, 1), (4, True, 2)])
    for planned, real in found:
        assert planned == pytest.approx(real, rel=0.1)


def test_alone_keeps_the_micro_steps_and_brings_an_optimizer() -> None:
    source = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}
    plan = single_process_plan(resolve(load(source), Facts(world_size=8, replicas=8)))
    assert (plan.batch.train_batch_size, plan.batch.replicas, plan.optimizer.type) == (6, 1, "AdamW")
