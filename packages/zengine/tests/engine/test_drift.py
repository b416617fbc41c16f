"""Ranks that disagree on options or trained parameters raise before the weights change."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.engine.drift import coefficient
from zengine.testing import Regression, rank_batch, small_engine
from zpartition.pipeline import LayerSpec, PipelineModule

Change = Callable[[zengine.Engine], object]


def options(engine: zengine.Engine, index: int = 0) -> dict[str, Any]:
    assert engine.optimizer is not None
    group: dict[str, Any] = engine.optimizer.param_groups[index]
    return group


def one_step(engine: zengine.Engine, index: int = 0) -> zengine.StepReport | None:
    report = None
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(rank_batch(index)))
        report = engine.step()
    return report


def weights(engine: zengine.Engine) -> list[float]:
    """All of them; at stage 3 a collective."""
    return torch.cat([value.reshape(-1).float() for value in engine.module.state_dict().values()]).tolist()


def set_lr(engine: zengine.Engine) -> None:
    options(engine)["lr"] = 0.2


def set_decay(engine: zengine.Engine) -> None:
    options(engine)["weight_decay"] = 0.5


def set_betas(engine: zengine.Engine) -> None:
    options(engine)["betas"] = (0.8, 0.999)


def set_betas_in_place(engine: zengine.Engine) -> None:
    options(engine)["betas"][0] = 0.8


def set_second_group(engine: zengine.Engine) -> None:
    options(engine, 1)["lr"] = 0.2


def add_option(engine: zengine.Engine) -> None:
    options(engine)["lr_scale"] = 2.0


def freeze(engine: zengine.Engine) -> None:
    engine.module.body.weight.requires_grad_(False)


CHANGES: list[tuple[Change, str]] = [
    (set_lr, "param_groups[0]['lr'] is 0.1 on rank 0 and 0.2 on rank 1"),
    (set_decay, "param_groups[0]['weight_decay'] is 0.0 on rank 0 and 0.5 on rank 1"),
    (set_betas, "param_groups[0]['betas'] is [0.9, 0.999] on rank 0 and (0.8, 0.999) on rank 1"),
    (set_betas_in_place, "param_groups[0]['betas'] is [0.9, 0.999] on rank 0 and [0.8, 0.999] on rank 1"),
    (set_second_group, "param_groups[1]['lr'] is 0.1 on rank 0 and 0.2 on rank 1"),
    (add_option, "param_groups[0]['lr_scale'] is missing on rank 0 and 2.0 on rank 1"),
    (freeze, "body.weight is trained on rank 0 and frozen on rank 1"),
]


def engine_of(stage: int, **config: Any) -> zengine.Engine:
    model = Regression()
    groups = [
        {"params": list(model.body.parameters()), "betas": [0.9, 0.999]},
        {"params": list(model.tail.parameters())},
    ]
    base = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "weight_decay": 0.0}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zengine.initialize(model=model, model_parameters=groups, config={**base, **config})[0]


def told(stage: int) -> list[tuple[str, bool, bool]]:
    """For each change on rank 1: the message, whether the weights stayed, whether training goes on without it."""
    found = []
    for change, _ in CHANGES:
        engine = engine_of(stage)
        one_step(engine)
        before, kept = weights(engine), [dict(group) for group in engine.optimizer.param_groups]
        kept[0]["betas"] = [0.9, 0.999]
        if zcomm.group_rank() == 1:
            change(engine)
        with pytest.raises(zengine.RanksDisagree) as caught:
            one_step(engine, 1)
        stayed = weights(engine) == before
        for group, old in zip(engine.optimizer.param_groups, kept):
            group.pop("lr_scale", None)
            group.update({key: value for key, value in old.items() if key != "params"})
        engine.module.body.weight.requires_grad_(True)
        report = one_step(engine, 1)
        assert report is not None
        found.append((str(caught.value), stayed, report.applied and weights(engine) != before))
        engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_changed_on_one_rank_is_named_on_all_before_the_weights_move(stage: int) -> None:
    for found in run_ranks(told, 2, stage):
        for (_, expected), (message, stayed, goes_on) in zip(CHANGES, found):
            assert expected in message
            assert stayed, message
            assert goes_on, message


def goes_on(stage: int, drive: str) -> tuple[list[float], list[float]]:
    """Weights after five steps, the third of which was refused, and after the other four."""
    more = {"offload_optimizer": {"device": "nvme", "nvme_path": drive}} if drive else {}
    found = []
    for refused in (2, None):
        engine = engine_of(stage, zero_optimization={"stage": stage, **more})
        for step in range(5):
            options(engine)["lr"] = 0.2 if step == refused and zcomm.group_rank() else 0.1
            if step == refused:
                with pytest.raises(zengine.RanksDisagree):
                    one_step(engine, step)
            elif step != 2:
                one_step(engine, step)
        found.append(weights(engine))
        engine.close()
    return found[0], found[1]


@pytest.mark.parametrize(("stage", "on_disk"), [(0, False), (1, False), (2, False), (3, False), (2, True)])
def test_nothing_is_left_of_a_step_that_was_refused(stage: int, on_disk: bool, tmp_path: Path) -> None:
    for refused, without in run_ranks(goes_on, 2, stage, str(tmp_path) if on_disk else ""):
        assert refused == without


def of_three() -> str:
    """Rank 2 has another rate."""
    engine = small_engine()
    options(engine)["lr"] = 0.2 if zcomm.group_rank() == 2 else 0.1
    with pytest.raises(zengine.RanksDisagree) as caught:
        one_step(engine)
    return str(caught.value)


def test_all_ranks_of_a_value_are_named() -> None:
    for message in run_ranks(of_three, 3):
        assert "param_groups[0]['lr'] is 0.1 on ranks 0, 1 and 0.2 on rank 2. " in message


def plateau(metric: str) -> tuple[int, str, float]:
    """In which step a plateau that is fed each rank's own loss, or the mean, is told; the rate then."""
    engine = small_engine()
    assert engine.optimizer is not None
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5, threshold=0.0)
    for step in range(6):
        loss = engine(rank_batch(0))
        engine.backward(loss)
        try:
            report = engine.step()
        except zengine.RanksDisagree as error:
            return step, str(error), options(engine)["lr"]
        assert report is not None
        noise = step * (0.1 if zcomm.group_rank() else -0.1)  # better and better on rank 0, worse on rank 1
        schedule.step(loss.item() + noise if metric == "own" else report.loss)
    return -1, "", options(engine)["lr"]


def test_a_plateau_that_sees_each_ranks_own_loss_is_told_in_the_step_after() -> None:
    (step, message, rate), (other, _, other_rate) = run_ranks(plateau, 2, "own")
    assert step == other == 2
    assert (rate, other_rate) == (0.1, 0.05)
    assert "param_groups[0]['lr'] is 0.1 on rank 0 and 0.05 on rank 1" in message
    assert "ReduceLROnPlateau" in message


def test_a_plateau_that_sees_the_mean_loss_is_not() -> None:
    assert [step for step, *_ in run_ranks(plateau, 2, "mean")] == [-1, -1]


def schedule_on_rank_0() -> list[str]:
    """A schedule that only rank 0 makes and steps: what happens in each step."""
    engine, found = small_engine(), []
    assert engine.optimizer is not None
    schedule = None
    if zcomm.group_rank() == 0:
        schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: 1 / (1 + step))
    for step in range(2):
        try:
            one_step(engine, step)
            found.append("")
        except zengine.RanksDisagree as error:
            found.append(str(error))
        if schedule is not None:
            schedule.step()
    return found


def test_a_schedule_that_rank_0_alone_steps_is_told_in_the_step_after() -> None:
    for first, second in run_ranks(schedule_on_rank_0, 2):
        assert first == ""
        assert "param_groups[0]['lr'] is 0.05 on rank 0 and 0.1 on rank 1" in second


def alike(case: str) -> list[bool]:
    """Whether each of some steps was applied, where ranks differ in nothing that counts."""
    rank, engine, found = zcomm.group_rank(), engine_of(1), []
    for step in range(4):
        if case == "zeros":
            options(engine)["weight_decay"] = -0.0 if rank else 0.0
        elif case == "kinds of numbers":
            options(engine)["lr"] = 1 if rank else 1.0
            options(engine)["amsgrad"] = 0 if rank else False
            options(engine)["betas"] = (0.5, 0) if rank else [0.5, 0.0]
        elif case == "NaN":
            options(engine)["lr"] = float("nan") if rank else -(math.inf - math.inf)
        elif case == "groups of their own":
            options(engine)["lr"], options(engine, 1)["lr"] = 0.01 * (step + 1), 0.02 / (step + 1)
        elif case == "tensors":
            options(engine)["lr"] = torch.tensor(0.25 / (step + 1))
        elif case == "order of keys":
            group = options(engine)
            group["lr"] = group.pop("lr") if rank else group["lr"]
        elif case == "frozen everywhere":
            engine.module.body.weight.requires_grad_(step % 2 == 0)
        elif case == "strangers":
            options(engine)["hook"] = object()
        report = one_step(engine, step)
        assert report is not None
        found.append(report.applied)
    engine.close()
    return found


@pytest.mark.parametrize(
    "case",
    [
        "zeros",
        "kinds of numbers",
        "groups of their own",
        "tensors",
        "order of keys",
        "frozen everywhere",
        "strangers",
    ],
)
def test_there_is_no_false_alarm(case: str) -> None:
    assert run_ranks(alike, 2, case) == [[True] * 4] * 2


def test_nan_on_all_ranks_is_alike() -> None:
    run_ranks(alike, 2, "NaN")


class Forked(Regression):
    """Rank 1 has no use for the last bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if zcomm.group_rank() == 0:
            return super().forward(x)
        return nn.functional.linear(torch.tanh(self.body(x)), self.tail.weight).square().mean()


def uneven(case: str) -> tuple[bool, list[str]]:
    """Whether a step in which rank 1 misses a gradient is applied, and the labels of its messages."""
    engine, log = small_engine(Forked(), gradient_accumulation_steps=2), []
    one_step(engine)
    with zcomm.traced(log.append):
        for _ in range(2):
            engine.backward(engine(rank_batch(1)))
            if case == "frozen in the middle":  # rank 0 has its gradient already, and does not look
                engine.module.body.bias.requires_grad_(False)
            report = engine.step()
    assert report is not None
    return report.applied, [record.label for record in log if "exchange" in record.label]


def test_ranks_may_miss_gradients_of_what_they_train() -> None:
    assert run_ranks(uneven, 2, "nothing frozen") == [(True, [])] * 2


def test_where_digests_differ_and_facts_do_not_the_step_counts() -> None:
    for applied, labels in run_ranks(uneven, 2, "frozen in the middle"):
        assert applied
        assert labels == ["exchange lengths", "exchange values"]


def overflows() -> list[bool]:
    """fp16 from a scale that overflows, with a rate that is the same everywhere or not."""
    engine = small_engine(fp16={"enabled": True, "initial_scale_power": 32})
    applied = []
    for _ in range(30):
        engine.backward(engine(torch.ones(2, 3, dtype=torch.half)))
        report = engine.step()
        assert report is not None
        applied.append(report.applied)
    if zcomm.group_rank():
        options(engine)["lr"] = 0.2
    engine.backward(engine(torch.ones(2, 3, dtype=torch.half)))
    with pytest.raises(zengine.RanksDisagree, match="'lr'"):
        engine.step()
    return applied


def test_skipped_steps_are_no_alarm() -> None:
    for applied in run_ranks(overflows, 2):
        assert False in applied
        assert applied[-1]


def stages() -> tuple[list[bool], str, bool]:
    """Two stages of two replicas: each stage has a rate of its own, then one rank of the second has another."""
    torch.manual_seed(0)
    layers = [LayerSpec(nn.Linear, 3, 3), torch.tanh, LayerSpec(nn.Linear, 3, 1)]
    model = PipelineModule(layers, 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (1 + model.pipeline_position.rank))
    config = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    engine, applied = zengine.initialize(model=model, optimizer=optimizer, config=config)[0], []

    def batch() -> bool:
        engine.train_batch(iter([(rank_batch(index), torch.ones(2, 1)) for index in range(2)]))
        return bool(engine.last_report)

    applied += [batch(), batch()]
    rate = options(engine)["lr"]
    options(engine)["lr"] = 0.7 if zcomm.group_rank() == 3 else rate
    with pytest.raises(zengine.RanksDisagree) as caught:
        batch()
    options(engine)["lr"] = rate
    return applied, str(caught.value), batch()


def test_stages_may_have_rates_of_their_own_and_ranks_of_one_may_not() -> None:
    for applied, message, goes_on in run_ranks(stages, 4):
        assert applied == [True, True]
        assert "param_groups[0]['lr'] is 0.2 on rank 2 and 0.7 on rank 3. " in message
        assert goes_on


def messages() -> list[str]:
    """Labels of the messages of a boundary."""
    engine, log = small_engine(), []
    one_step(engine)
    engine.backward(engine(rank_batch(0)))
    with zcomm.traced(log.append):
        engine.step()
    return [record.label for record in log]


def test_agreement_costs_no_message() -> None:
    assert run_ranks(messages, 2) == [["gradient statistics"]] * 2


def test_a_world_of_one_has_nobody_to_disagree_with() -> None:
    engine = small_engine()
    one_step(engine)
    options(engine)["lr"] = 0.2
    assert one_step(engine)


@pytest.mark.parametrize("ranks", [(0, 1), (4, 9), (0, 2, 4, 6), tuple(range(100))])
def test_coefficients_add_up_to_nothing_and_none_is_nothing(ranks: tuple[int, ...]) -> None:
    found = [coefficient(ranks, rank) for rank in ranks]
    assert sum(found) == 0
    assert all(found)


def test_a_rank_alone_counts_for_nothing() -> None:
    assert coefficient((3,), 3) == 0
