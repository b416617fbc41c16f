"""`engine.scale(loss).backward()` equals `engine.backward(loss)`; a plain backward is used, or raises."""

from __future__ import annotations

import math

import pytest
import torch

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine import CallOrderError, Feature, _compat
from zengine.testing import rank_batch, small_engine


def run(engine: zengine.Engine, style: str, steps: int = 3) -> tuple[list[object], dict[str, torch.Tensor]]:
    """All reports but None, and the weights."""
    reports = []
    for index in range(steps * engine.gradient_accumulation_steps()):
        loss = engine(rank_batch(index).to(next(engine.module.parameters()).dtype))
        if style == "engine":
            engine.backward(loss)
        elif style == "scale":
            engine.scale(loss).backward()
        else:
            loss.backward()
        report = engine.step()
        reports += [] if report is None else [report]
    return reports, {name: tensor.clone() for name, tensor in engine.state_dict().items()}


def _styles_agree() -> int:
    configs = [{"zero_optimization": {"stage": stage}} for stage in (0, 1, 2, 3)]
    for config in configs:
        _same(config, "plain")
        _same({**config, "gradient_accumulation_steps": 2}, "scale")
        _same({**config, "gradient_accumulation_steps": 2}, "plain")  # halves are exact
    for stage in (0, 2, 3):
        _same({"fp16": {"enabled": True, "initial_scale_power": 6}, "zero_optimization": {"stage": stage}}, "scale")
    _same({"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "scale")
    return len(configs)


def _same(config: dict[str, object], style: str) -> None:
    wanted, weights = run(small_engine(**config), "engine")
    reports, found = run(small_engine(**config), style)
    assert all(torch.equal(weights[name], found[name]) for name in weights), (config, style)
    assert [r.grad_norm for r in reports] == [r.grad_norm for r in wanted]
    assert style == "plain" or reports == wanted


@pytest.mark.parametrize("world_size", [1, 2])
def test_all_styles_give_the_same_weights_and_reports(world_size):
    assert run_ranks(_styles_agree, world_size) == [4] * world_size


def _one_rank_has_no_gradients() -> tuple[float, list[torch.Tensor]]:
    engine = small_engine(zero_optimization={"stage": 2})
    loss = engine(rank_batch(0))
    if zcomm.group_rank() == 0:
        loss.backward()
    report = engine.step()
    assert report
    for _ in range(2):
        engine(rank_batch(0))
        with pytest.raises(ValueError, match="no rank produced a gradient for any parameter"):
            engine.step()  # all of them forgot
    return report.grad_norm, list(engine.module.parameters())


def test_a_rank_without_gradients_takes_part_with_zeros_and_nobody_waits():
    (norm, first), (_, second) = run_ranks(_one_rank_has_no_gradients, 2)
    alone = small_engine()
    alone.backward(alone(rank_batch(0)) / 2)
    assert alone.step().grad_norm == pytest.approx(norm)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close([param.detach() for param in first], [p.detach() for p in alone.module.parameters()])


def test_without_callbacks_of_autograd_the_engines_next_call_ends_the_backward(monkeypatch):
    wanted, weights = run(small_engine(), "engine")
    monkeypatch.setattr(_compat, "TELLS_END", False)
    reports, found = run(small_engine(), "scale")
    assert reports == wanted
    assert all(torch.equal(weights[name], found[name]) for name in weights)


def test_the_loss_of_a_plain_backward_is_not_known():
    reports, _ = run(small_engine(), "plain", steps=1)
    assert reports[0].applied
    assert torch.tensor(reports[0].loss).isnan()


def test_a_plain_backward_and_one_of_the_engine_make_a_step_whose_loss_is_not_known():
    mixed, own = small_engine(), small_engine()
    for index in (0, 1):
        for engine in (mixed, own):
            engine.set_gradient_accumulation_boundary(index == 1)
        loss = mixed(rank_batch(index))
        loss.backward() if index == 0 else mixed.backward(loss)
        own.backward(own(rank_batch(index)))
        reports = mixed.step(), own.step()
    assert math.isnan(reports[0].loss)
    assert reports[0].grad_norm == pytest.approx(reports[1].grad_norm)
    torch.testing.assert_close(mixed.state_dict(), own.state_dict())


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"fp16": {"enabled": True, "initial_scale_power": 4}}, "the loss scale, 16 now:"),
        ({"fp16": {"enabled": True, "loss_scale": 8}, "gradient_accumulation_steps": 2}, "the loss scale, 8 now:"),
    ],
)
def test_step_says_what_a_plain_backward_misses(config, missing):
    engine = small_engine(**config)
    engine(rank_batch(0).to(next(engine.module.parameters()).dtype)).backward()
    with pytest.raises(CallOrderError, match=missing):
        engine.step()
    engine.zero_grad()
    assert run(engine, "scale", steps=1)[0]


def test_two_scaled_losses_may_go_back_together_or_one_after_the_other():
    def step(how: str) -> zengine.StepReport:
        engine = small_engine()
        first, second = engine(rank_batch(0)), engine(rank_batch(1))
        if how == "engine":
            engine.backward(first + second)
        elif how == "sum":
            (engine.scale(first) + engine.scale(second)).backward()
        else:
            engine.scale(first).backward()
            engine.scale(second).backward()
        return engine.step()

    wanted = step("engine")
    for how in ("sum", "apart"):
        report = step(how)
        assert report.loss == pytest.approx(wanted.loss)
        assert report.grad_norm == pytest.approx(wanted.grad_norm)


def test_after_a_failing_backward_the_step_begins_again():
    clean = run(small_engine(gradient_accumulation_steps=2), "scale", steps=1)
    engine = small_engine(gradient_accumulation_steps=2)
    engine.scale(engine(rank_batch(5))).backward()
    engine.step()
    loss = engine.scale(engine(rank_batch(6)))
    hook = engine.module.body.weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    with pytest.raises(CallOrderError, match=r"step\(\) called in phase IDLE"):
        engine.step()
    reports, weights = run(engine, "scale", steps=1)
    assert reports[0].grad_norm == clean[0][0].grad_norm
    assert all(torch.equal(weights[name], clean[1][name]) for name in weights)


def test_features_and_the_callers_tensor_are_treated_as_in_engine_backward():
    seen: list[str] = []

    class Spy(Feature):
        def backward_begin(self, micro, loss):
            seen.append("begin")
            return loss

        def backward_end(self, micro):
            seen.append(f"end {micro.index}")

    engine = small_engine()
    engine.add_feature(Spy())
    loss = engine(rank_batch(0))
    engine.scale(loss).backward()
    assert not loss._backward_hooks
    assert seen == ["begin", "end 0"]
    engine.step()
    engine.backward(engine(rank_batch(0)))
    assert seen == ["begin", "end 0"] * 2


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"gradient_accumulation_steps": 4}, "the division by gradient_accumulation_steps = 4:"),
        (
            {"fp16": {"enabled": True, "loss_scale": 8}, "gradient_accumulation_steps": 2},
            "the division by gradient_accumulation_steps = 2 and the loss scale, 8 now:",
        ),
    ],
)
@pytest.mark.parametrize("style", ["engine", "scale"])
def test_a_backward_of_the_engine_does_not_add_to_plain_gradients_without_its_factors(config, missing, style):
    engine = small_engine(**config)
    batch = rank_batch(0).to(next(engine.module.parameters()).dtype)
    engine(batch).backward()
    loss = engine(batch)
    with pytest.raises(CallOrderError, match=rf"would add to gradients of a plain loss.backward\(\).* {missing}"):
        engine.backward(loss) if style == "engine" else engine.scale(loss).backward()
    assert all(param.grad is None for param in engine.module.parameters())
    loss = engine(batch)
    loss.backward(retain_graph=True)
    engine.optimizer.zero_grad()
    engine.backward(loss)
    assert engine.step() is None


def test_a_plain_backward_that_added_to_gradients_of_the_engine_raises():
    engine = small_engine(gradient_accumulation_steps=2)
    engine.backward(engine(rank_batch(0)))
    engine.step()
    engine(rank_batch(1)).backward()
    with pytest.raises(CallOrderError, match=r"added to gradients of an engine.backward\(\) of the same step"):
        engine.step()
    engine.restart_step()
    assert run(engine, "plain", steps=1)[0]


def _plain_after_weighted() -> None:
    engine = small_engine(gradient_accumulation_steps=2)
    engine.backward(engine(rank_batch(0)), weight=3)
    engine.step()
    engine.module.zero_grad()
    engine(rank_batch(1)).backward()
    with pytest.raises(ValueError, match=r"plain loss.backward\(\), after an engine.backward with a weight"):
        engine.step()
    assert run(engine, "plain", steps=1)[0]


def test_a_plain_backward_after_a_weighted_one_in_the_same_step_raises():
    run_ranks(_plain_after_weighted, 2)


def test_plain_gradients_do_not_stay_on_a_rank():
    engine = small_engine(gradient_accumulation_steps=2)
    with engine.no_sync():
        engine(rank_batch(0)).backward()
        with pytest.raises(CallOrderError, match=r"inside no_sync\(\), where they would be reduced"):
            engine.step()
    assert engine.step() is None


def test_scale_needs_an_open_engine_and_a_scalar():
    engine = small_engine()
    with pytest.raises(ValueError, match="scalar loss"):
        engine.scale(torch.ones(2, requires_grad=True))
    engine.close()
    with pytest.raises(CallOrderError, match=r"scale\(\) called in phase CLOSED"):
        engine.scale(torch.ones((), requires_grad=True))


def test_a_generator_trains_through_a_discriminator_whose_step_is_its_own():
    generator, critic = small_engine(), small_engine(zero_optimization={"stage": 2})
    alone = small_engine(zero_optimization={"stage": 2})
    for index in range(2):
        generator.scale(critic(rank_batch(index)) + generator(rank_batch(index))).backward()
        assert generator.step()
        critic.zero_grad()
        for each in (critic, alone):
            each.scale(each(rank_batch(index))).backward()
            assert each.step()
    found, wanted = critic.state_dict(), alone.state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
