"""DeepSpeed's optimizer classes give the updates of zoptim's with the same meaning."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import zoptim
from zengine import deepspeed
from zengine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
from zengine.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from zengine.deepspeed.ops.lamb import FusedLamb
from zengine.deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

Make = Callable[[Any], torch.optim.Optimizer]

PAIRS: list[tuple[str, Make, Make]] = [
    ("FusedAdam decouples", lambda p: FusedAdam(p, weight_decay=0.1), lambda p: zoptim.AdamW(p, weight_decay=0.1)),
    (
        "FusedAdam, adam_w_mode off, no bias correction",
        lambda p: FusedAdam(p, 0.01, False, (0.8, 0.9), 1e-6, False, 0.1),
        lambda p: zoptim.Adam(p, 0.01, (0.8, 0.9), 1e-6, 0.1, bias_correction=False),
    ),
    (
        "DeepSpeedCPUAdam decouples",
        lambda p: DeepSpeedCPUAdam(p, weight_decay=0.1),
        lambda p: zoptim.AdamW(p, weight_decay=0.1),
    ),
    (
        "DeepSpeedCPUAdam, adamw_mode off, amsgrad",
        lambda p: DeepSpeedCPUAdam(p, weight_decay=0.1, adamw_mode=False, amsgrad=True),
        lambda p: zoptim.Adam(p, weight_decay=0.1, amsgrad=True),
    ),
    (
        "DeepSpeedCPUAdam, states in bfloat16",
        lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
        lambda p: zoptim.AdamW(p, weight_decay=0, state_dtype="bf16"),
    ),
    (
        "Adagrad",
        lambda p: DeepSpeedCPUAdagrad(p, weight_decay=0.1),
        lambda p: zoptim.Adagrad(p, 0.01, weight_decay=0.1),
    ),
    ("FusedLion", lambda p: FusedLion(p, weight_decay=0.1), lambda p: zoptim.Lion(p, 1e-3, (0.9, 0.999), 0.1)),
    ("CPULion", lambda p: DeepSpeedCPULion(p, 0.01), lambda p: zoptim.Lion(p, 0.01, (0.9, 0.999))),
    (
        "FusedLamb",
        lambda p: FusedLamb(p, 0.01, max_coeff=5.0, min_coeff=0.1),
        lambda p: zoptim.LAMB(p, 0.01, max_coeff=5.0, min_coeff=0.1),
    ),
]


def updated(make: Make) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 40).view(8, 5))
    optimizer = make([weight])
    for step in range(3):
        weight.grad = torch.sin(torch.arange(40.0).view(8, 5) + step)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize(("theirs", "ours"), [pair[1:] for pair in PAIRS], ids=[pair[0] for pair in PAIRS])
def test_the_class_is_zoptims_with_other_arguments(theirs: Make, ours: Make):
    assert torch.equal(updated(theirs), updated(ours))


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: FusedAdam(p, amsgrad=True), "does not support amsgrad"),
        (lambda p: DeepSpeedCPUAdagrad(p, amsgrad=True), "no amsgrad variant"),
        (lambda p: FusedLamb(p, amsgrad=True), "no amsgrad variant"),
        (lambda p: FusedLamb(p, max_grad_norm=1.0), "set gradient_clipping in the config"),
    ],
)
def test_what_a_class_cannot_do_is_refused(make: Make, told: str):
    with pytest.raises((RuntimeError, ValueError), match=told):
        make([torch.nn.Parameter(torch.ones(2))])


def run_with(make: Make, folder: str, steps: int, resume: bool = False) -> torch.Tensor:
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 3)
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}}
    engine = deepspeed.initialize(model=net, optimizer=make(net.parameters()), config=config)[0]
    if resume:
        engine.load_checkpoint(folder)
    for _ in range(steps):
        engine.backward(engine(torch.ones(2, 4)).square().mean())
        engine.step()
    engine.save_checkpoint(folder)
    return net.weight.detach().clone()


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda p: DeepSpeedCPUAdam(p, 0.1), lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0)),
        (lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0), lambda p: FusedAdam(p, 0.1)),
        (lambda p: FusedLion(p, 0.1), lambda p: zoptim.Lion(p, 0.1, (0.9, 0.999))),
    ],
)
def test_a_run_may_go_on_with_another_class_of_the_same_optimizer(first: Make, second: Make, tmp_path):
    whole = run_with(first, str(tmp_path / "whole"), 3)
    run_with(first, str(tmp_path / "parts"), 2)
    assert torch.allclose(run_with(second, str(tmp_path / "parts"), 1, resume=True), whole, atol=1e-6)
