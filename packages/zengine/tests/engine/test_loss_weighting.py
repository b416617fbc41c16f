"""Weighted losses: accumulation, ranks and one large batch give the same gradients for uneven batches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.engine.clock import Clock, MicroStep
from zengine.engine.loss_weighting import StepLoss
from zengine.testing import small_engine

COUNTS = (3, 1, 7, 2, 0, 5, 1, 6)  # tokens of eight micro-batches; one is all padding
STEPS = 2


class Net(nn.Module):
    """Mean squared error over as many rows as it is given; the mean over none is 0."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.tail = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(torch.tanh(self.body(x))).square().sum() / max(len(x), 1)


def rows(step: int) -> list[torch.Tensor]:
    """The micro-batches of one step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(count, 3, generator=generator) * (1 + index) for index, count in enumerate(COUNTS)]


def one_large_batch(clip: float) -> tuple[list[float], list[float], list[torch.Tensor]]:
    """Losses, norms and weights of plain torch over all rows of a step at once, in float64."""
    model = Net().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, norms = [], []
    for step in range(STEPS):
        loss = model(torch.cat(rows(step)).double())
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip or 1e9)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, [param.detach().float() for param in model.parameters()]


def train(as_tensor: bool = False, **config: object) -> tuple[list[zengine.StepReport], list[torch.Tensor]]:
    """The same rows in micro-batches, dealt to the ranks in turn."""
    rank, world_size = zcomm.group_rank(), zcomm.group_size()
    base = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": len(COUNTS) // world_size,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    }
    engine, *_ = zengine.initialize(model=Net(), config={**base, **config})
    dtype = next(engine.module.parameters()).dtype
    reports = []
    for step in range(STEPS):
        for batch in rows(step)[rank::world_size]:
            weight = torch.tensor(len(batch)) if as_tensor else len(batch)
            engine.backward(engine(batch.to(dtype)).float(), weight=weight)
            report = engine.step()
        reports.append(report)
    state = engine.state_dict()
    return reports, [state[name].float().clone() for name, _ in engine.module.named_parameters()]


def _equals_one_large_batch() -> int:
    num_checked = 0
    stages = [(stage, clip) for stage in (0, 1, 2, 3) for clip in (0, 0.5)]
    for stage, clip in stages:
        losses, norms, weights = one_large_batch(clip)
        config = {"zero_optimization": {"stage": stage}, "gradient_clipping": clip}
        reports, found = train(as_tensor=clip != 0, **config)
        assert [r.loss for r in reports] == pytest.approx(losses, rel=1e-5)
        assert [r.grad_norm for r in reports] == pytest.approx(norms, rel=1e-5)
        torch.testing.assert_close(found, weights, rtol=1e-5, atol=1e-6)
        num_checked += 1
    for section, tolerance in (({"fp16": {"enabled": True}}, 5e-3), ({"bf16": {"enabled": True}}, 3e-2)):
        _losses, norms, weights = one_large_batch(0)
        reports, found = train(**section, zero_optimization={"stage": 2}, gradient_clipping=0)
        assert all(reports)  # also at fp16's first scale, 65536: weights add nothing to the range
        assert [r.grad_norm for r in reports] == pytest.approx(norms, rel=tolerance)
        torch.testing.assert_close(found, weights, rtol=tolerance, atol=tolerance)
        num_checked += 1
    return num_checked


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_split_into_micro_batches_and_ranks_equals_one_large_batch(world_size):
    assert run_ranks(_equals_one_large_batch, world_size) == [10] * world_size


def _says_who_gives_no_weight() -> list[str]:
    engine = make(1)
    weight = {"weight": 3} if zcomm.group_rank() == 0 else {}
    told = []
    for _ in range(2):
        loss = engine(torch.ones(2, 3))
        with pytest.raises(ValueError, match="1 of 2 ranks gave backward") as caught:
            engine.backward(loss, **weight)  # the first one of a run
        told.append(str(caught.value))
    engine.backward(engine(torch.ones(2, 3)))
    assert engine.step()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)), **weight)  # a later one: found with the statistics
        with pytest.raises(ValueError, match="1 of 2 ranks gave backward") as caught:
            engine.step()
        told.append(str(caught.value))
    return told


def test_ranks_that_disagree_are_told_so_and_do_not_hang():
    first, second = run_ranks(_says_who_gives_no_weight, 2)
    assert first == second


def _weighs_from_the_second_step_on() -> list[object]:
    engine, plain = make(2), make(2)
    log: list[object] = []
    for step, count in enumerate((None, 512, 512)):
        for each, weight in ((plain, None), (engine, count)):
            with zcomm.traced(log.append if each is engine and step else lambda _: None):
                for _ in range(2):
                    each.backward(each(torch.full((2, 3), 1.0 + step)), weight=weight)
                    report = each.step()
    assert report
    torch.testing.assert_close(engine.state_dict(), plain.state_dict())
    return [engine.clock.weight_exponent, sum("exchange" in str(record) for record in log)]


def test_weights_that_begin_later_cause_no_message_and_find_their_unit_at_the_boundary():
    assert run_ranks(_weighs_from_the_second_step_on, 2) == [[10, 0]] * 2


def make(accumulation: int) -> zengine.Engine:
    return small_engine(Net(), gradient_accumulation_steps=accumulation)


def test_a_step_with_and_without_weights_is_refused_and_begins_again():
    engine = make(2)
    for first, second in (({"weight": 2}, {}), ({}, {"weight": 2})):
        engine.backward(engine(torch.ones(2, 3)), **first)
        engine.step()
        loss = engine(torch.ones(2, 3))
        with pytest.raises(ValueError, match="give every backward of a step its weight, or none"):
            engine.backward(loss, **second)
        assert engine.clock.index == 0


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), torch.ones(2)])
def test_a_weight_is_one_number_of_at_least_0(weight):
    engine = make(1)
    loss = engine(torch.ones(2, 3))
    with pytest.raises(ValueError, match="weight="):
        engine.backward(loss, weight=weight)


def test_a_step_in_which_nothing_counts_is_skipped_with_the_reason():
    engine = make(1)
    before = engine.module.tail.weight.clone()
    engine.backward(engine(torch.ones(2, 3)), weight=0)
    report = engine.step()
    assert not report
    assert "weights of all losses of the step are 0" in report.reason
    assert torch.equal(engine.module.tail.weight, before)
    engine.backward(engine(torch.ones(2, 3)), weight=5)
    assert engine.step()


@pytest.mark.parametrize("as_weight", [int, torch.tensor])
def test_a_micro_batch_of_padding_counts_for_nothing_though_its_mean_is_nan(as_weight):
    engine, reports = make(2), []
    for targets in ([-100, -100], [0, 0], [0, 0], [-100, -100]):
        scores = engine(torch.ones(2, 3)).expand(2, 4)
        loss = nn.functional.cross_entropy(scores, torch.tensor(targets), ignore_index=-100)
        engine.backward(loss, weight=as_weight(sum(target >= 0 for target in targets)))
        reports.append(engine.step())
    assert [reports[1].loss, reports[3].loss] == pytest.approx([math.log(4)] * 2)
    assert all(reports[1::2])


def test_the_first_batches_that_weigh_something_choose_the_unit():
    engine, weights = make(1), (0, 4096)
    for weight in weights:
        engine.backward(engine(torch.ones(2, 3)), weight=weight)
        engine.step()
    assert engine.clock.weight_exponent == 12


def test_equal_weights_change_nothing():
    weighted, plain = make(2), make(2)
    for _ in range(2):
        for index in range(2):
            batch = torch.full((2, 3), 1.0 + index)
            weighted.backward(weighted(batch), weight=2)
            plain.backward(plain(batch))
            reports = weighted.step(), plain.step()
    assert reports[0] == reports[1]
    assert all(torch.equal(a, b) for a, b in zip(weighted.module.parameters(), plain.module.parameters()))


@pytest.mark.parametrize(("mean", "exponent"), [(1.0, 2), (100.0, 9), (0.01, -5)])
def test_the_unit_is_a_power_of_two_near_the_weight_of_a_step_and_stays(mean, exponent):
    clock = Clock(accumulation=4, samples_per_micro_step=1)
    losses = StepLoss(clock, torch.device("cpu"), 2, lambda own: [own, 2 * mean - own])
    micro = MicroStep(index=0, count=4, step=0, is_first=True, is_last=False)
    losses.share(torch.ones((), requires_grad=True), micro, mean / 2, divides=True)
    assert clock.weight_exponent == exponent
    losses.share(torch.ones((), requires_grad=True), micro, 1e6, divides=True)
    assert clock.weight_exponent == exponent
    other = Clock(accumulation=4, samples_per_micro_step=1)
    other.load_state_dict(clock.state_dict())
    assert other.weight_exponent == exponent
