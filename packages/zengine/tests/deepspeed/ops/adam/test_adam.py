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
        "DeepSpeedCPUAdam, states in the parameters' dtype",
        lambda p: DeepSpeedCPUAdam(p, fp32_optimizer_states=False),
        lambda p: zoptim.AdamW(p, weight_decay=0),
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


DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KEEPS = {DeepSpeedCPUAdam: ("exp_avg", "exp_avg_sq"), DeepSpeedCPULion: ("exp_avg",), DeepSpeedCPUAdagrad: ("sum",)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("in_fp32", [True, False, None], ids=["fp32", "as the parameter", "by default"])
@pytest.mark.parametrize("cls", KEEPS)
def test_states_are_float32_unless_they_are_to_follow_the_parameter(cls: Any, in_fp32: bool | None, dtype: Any):
    """DeepSpeed: `torch.float if self.fp32_optimizer_states else p.dtype`."""
    weight = torch.nn.Parameter(torch.ones(300, dtype=dtype))
    optimizer = cls([weight], lr=0.5, **({} if in_fp32 is None else {"fp32_optimizer_states": in_fp32}))
    weight.grad = torch.full_like(weight, 0.25)
    optimizer.step()
    wanted = dtype if in_fp32 is False else torch.float32
    assert {optimizer.state[weight][key].dtype for key in KEEPS[cls]} == {wanted}


@pytest.mark.parametrize("cls", KEEPS)
def test_float32_states_of_bf16_weights_resume_exactly_in_any_form(cls: Any):
    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer, number: int) -> None:
        weight.grad = torch.sin(torch.arange(300.0) + number).to(weight.dtype)
        optimizer.step()

    for dtype in DTYPES[:2]:
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 300).to(dtype))
        optimizer = cls([weight], lr=0.01)
        for number in range(3):
            step(weight, optimizer, number)
        twins = [torch.nn.Parameter(weight.detach().clone()) for _ in range(2)]
        for twin, compact in zip(twins, (False, True)):
            resumed = cls([twin], lr=0.5)
            resumed.load_state_dict(optimizer.state_dict(compact=compact))
            step(twin, resumed, 3)
        step(weight, optimizer, 3)
        assert all(torch.equal(weight, twin) for twin in twins)


@pytest.mark.parametrize("cls", [FusedAdam, DeepSpeedCPUAdam])
@pytest.mark.parametrize("theirs", [torch.optim.Adam, torch.optim.AdamW])
def test_loading_does_not_change_whether_the_decay_is_decoupled(cls: Any, theirs: Any):
    """DeepSpeed keeps the mode in the object; its own state dicts do not have it at all."""
    weight = torch.nn.Parameter(torch.ones(4))
    source = theirs([weight], lr=0.1, weight_decay=0.1)
    weight.grad = torch.ones(4)
    source.step()
    whole = source.state_dict()
    lean = {**whole, "param_groups": [{key: whole["param_groups"][0][key] for key in DEEPSPEEDS_OPTIONS}]}
    for mode in (True, False):
        for state in (whole, lean):
            optimizer = cls([weight], **{"adam_w_mode" if cls is FusedAdam else "adamw_mode": mode})
            optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["decoupled_weight_decay"] is mode
            assert (optimizer.param_groups[0]["lr"], optimizer.checkpoint_kind) == (0.1, "AdamW" if mode else "Adam")


DEEPSPEEDS_OPTIONS = ("lr", "betas", "eps", "weight_decay", "params")


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("cls", KEEPS)
def test_under_bf16_masters_an_engine_keeps_and_resumes_what_was_asked_for(cls: Any, in_fp32: bool, tmp_path):
    def run(folder: str, steps: int, resume: bool = False) -> tuple[torch.Tensor, torch.dtype]:
        torch.manual_seed(0)
        net = torch.nn.Linear(16, 16)
        bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": not in_fp32}
        config = {"train_micro_batch_size_per_gpu": 2, "bf16": bf16, "zero_optimization": {"stage": 1}}
        optimizer = cls(net.parameters(), lr=0.05, fp32_optimizer_states=in_fp32)
        engine = deepspeed.initialize(model=net, optimizer=optimizer, config=config)[0]
        if resume:
            engine.load_checkpoint(folder)
        for _ in range(steps):
            engine.backward(engine(torch.ones(2, 16).bfloat16()).float().square().mean())
            engine.step()
        engine.save_checkpoint(folder)
        (dtype,) = {state[KEEPS[cls][0]].dtype for state in optimizer.state.values()}
        return net.weight.detach().clone(), dtype

    whole, dtype = run(str(tmp_path / "whole"), 3)
    assert dtype == (torch.float32 if in_fp32 else torch.bfloat16)
    run(str(tmp_path / "parts"), 2)
    assert torch.equal(run(str(tmp_path / "parts"), 1, resume=True)[0], whole)


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
