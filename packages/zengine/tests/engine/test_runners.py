"""Runners alone, and bit-identity of autocast in an engine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.engine.runners import AutocastRunner, CastingRunner, RunnerWithCleanup, Sequential
from zengine.testing import small_engine
from zprecision import FP16


class Echo(nn.Module):
    """Returns what it was given."""

    def forward(self, *args: object, **kwargs: object) -> object:
        return args, kwargs


def test_the_identity_runner_calls_the_module():
    assert Sequential().forward(Echo(), (1, "a"), {"b": 2}) == ((1, "a"), {"b": 2})


def test_the_casting_runner_casts_floating_inputs_only():
    (x, tokens), kwargs = CastingRunner(FP16).forward(
        Echo(), (torch.ones(2), torch.ones(2).long()), {"y": torch.ones(1)}
    )
    assert (x.dtype, tokens.dtype, kwargs["y"].dtype) == (torch.float16, torch.int64, torch.float16)


def test_an_engine_casts_inputs_when_the_config_asks_for_it():
    model = nn.Linear(2, 1)
    config = {"train_batch_size": 1, "fp16": {"enabled": True, "auto_cast": True}}
    assert zengine.initialize(model=model, config=config)[0](torch.ones(1, 2)).dtype == torch.float16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_covers_forward_and_nothing_else(dtype):
    model = nn.Linear(8, 8)
    output = AutocastRunner("cpu", dtype).forward(model, (torch.ones(2, 8),), {})
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(output, model(torch.ones(2, 8)))
    assert (output.dtype, torch.is_autocast_enabled("cpu")) == (dtype, False)


def test_what_a_runner_holds_is_closed_even_if_one_of_it_fails():
    closed = []

    class Held:
        def __init__(self, name: str, error: bool = False) -> None:
            self.name, self.error = name, error

        def close(self) -> None:
            closed.append(self.name)
            if self.error:
                raise ValueError(self.name)

    runner = RunnerWithCleanup(Sequential(), (Held("first"), Held("second", error=True)))
    assert runner.forward(Echo(), (1,), {}) == ((1,), {})
    with pytest.raises(ValueError, match="second"):
        runner.close()
    assert closed == ["second", "first"]


def bare_loop(dtype: torch.dtype) -> list[torch.Tensor]:
    """Losses and last weights of plain torch with autocast."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(4):
        with torch.autocast("cpu", dtype=dtype):
            output = model(inputs(step))
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(param.detach() for param in model.parameters())]


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4))


def inputs(step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(step))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_engine_under_autocast_has_the_bits_of_a_bare_loop_under_autocast(stage):
    model = network()
    config = {
        "train_batch_size": 6,
        "gradient_clipping": 0,
        "torch_autocast": {"enabled": True, "dtype": "bf16"},
        "zero_optimization": {"stage": stage},
    }
    made = torch.optim.AdamW(model.parameters(), lr=0.05)
    engine, *_ = zengine.initialize(model=model, optimizer=made, config=config)
    ours = []
    for step in range(4):
        loss = engine(inputs(step)).float().square().mean()
        engine.backward(loss)
        engine.step()
        ours.append(loss.detach())
    engine.close()
    ours += [param.detach() for param in model.parameters()]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, bare_loop(torch.bfloat16), strict=True))


def test_autocast_in_float16_scales_the_loss_and_counts_what_overflows():
    model = network()
    config = {
        "train_batch_size": 6,
        "gradient_clipping": 0,
        "torch_autocast": {"enabled": True, "dtype": "fp16"},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    assert engine.current_loss_scale == 2.0**16
    engine.backward(engine(inputs(0)).float().square().mean() * 1e30)
    report = engine.step()
    assert not report
    assert "step skipped" in report.reason
    engine.backward(engine(inputs(0)).float().square().mean())
    assert engine.step()
    assert {param.dtype for param in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("section", "weights", "autocast", "chosen"),
    [
        ("fp16", torch.float16, {}, torch.float16),
        ("fp16", torch.float16, {"dtype": "bf16"}, torch.bfloat16),
        ("bf16", torch.bfloat16, {"dtype": "fp16", "loss_scale": 64}, torch.float16),
    ],
)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_weights_of_16_bits_under_autocast_have_the_bits_of_a_loop_with_masters(
    stage, section, weights, autocast, chosen
):
    """As in DeepSpeed: the section of the weights sets masters and loss scale, the autocast casts operations."""
    scale = {"loss_scale": 64} if section == "fp16" else {}
    config = {
        "train_batch_size": 6,
        "gradient_clipping": 0,
        section: {"enabled": True, **scale},
        "torch_autocast": {"enabled": True, **autocast},
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage},
    }
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    bare = copy.deepcopy(model).to(weights)
    masters = [param.detach().float() for param in bare.parameters()]
    engine, *_ = zengine.initialize(model=model, config=config)
    for step in range(3):
        output = engine(inputs(step))
        loss = output.float().square().mean()
        engine.backward(loss)
        assert engine.step()
        with torch.autocast("cpu", dtype=chosen):
            expected = bare(inputs(step))
        assert output.dtype == expected.dtype == chosen
        assert torch.equal(output, expected)
        (expected.float().square().mean() * 64).backward()
        for param, master in zip(bare.parameters(), masters, strict=True):
            master -= 0.05 * (param.grad.float() / 64)
            param.data.copy_(master)
            param.grad = None
    assert engine.current_loss_scale == 64
    engine.close()


def _wires(stage: int, section: dict[str, object]) -> set[tuple[int, str]]:
    """(elements rounded down to thousands, dtype) of the gradients that travel in one step."""
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64, elementwise_affine=True), nn.Linear(64, 64))
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, **section}
    made = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = zengine.initialize(model=model, optimizer=made, config=config)[0]
    with zcomm.traced([]) as records:
        engine.backward(engine(torch.ones(2, 64, dtype=model[0].weight.dtype)).float().square().mean())
        engine.step()
    engine.close()
    return {(each.numel, each.dtype) for each in records if each.label.startswith("gradients[")}


@pytest.mark.parametrize("stage", [0, 2])
def test_gradients_of_safe_modules_travel_in_the_lower_dtype(stage):
    linears, norm = 10240, 2048  # padded
    on = {"enabled": True}
    assert run_ranks(_wires, 2, stage, {"torch_autocast": on})[0] == {(linears, "bfloat16"), (norm, "float32")}
    every = {"torch_autocast": on, "communication_data_type": "fp32"}
    assert run_ranks(_wires, 2, stage, every)[0] == {(linears, "float32")}
    kept = {"bf16": on, "data_types": {"keep_in_fp32_modules": ["1."]}}
    assert run_ranks(_wires, 2, stage, kept)[0] == {(linears, "bfloat16"), (norm, "float32")}


class Batched(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = self.layer(batch["x"][0]).mean()
        return loss


@pytest.mark.parametrize(
    ("section", "dtype", "key"),
    [("bf16", torch.bfloat16, '"torch_autocast"'), ("fp16", torch.float16, '"fp16": {"auto_cast": true}')],
)
def test_a_wide_batch_in_a_narrow_model_says_what_to_cast(section: str, dtype: torch.dtype, key: str) -> None:
    x = torch.ones(2, 3)
    with small_engine(Batched(), **{section: {"enabled": True}}) as engine:
        with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
            engine(batch={"x": (x, torch.ones(2, dtype=torch.int64))})
        assert "batch['x'][0] in torch.float32" in str(caught.value)
        assert f"(x.to({dtype}))" in str(caught.value)
        assert key in str(caught.value)
        assert engine(batch={"x": [x.to(dtype)]}).dtype == dtype
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            engine(batch={"x": [torch.ones(2, 5, dtype=dtype)]})


def test_auto_cast_casts_floating_tensors_in_nested_arguments() -> None:
    with small_engine(Batched(), fp16={"enabled": True, "auto_cast": True}) as engine:
        assert engine(batch={"x": (torch.ones(2, 3),)}).dtype == torch.float16
