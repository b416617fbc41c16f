"""Tensor ranks with different batches raise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.features import SameBatch
from zengine.features.same_batch import EVERY, FIRST
from zengine.testing import small_engine
from zpartition.testing.tensor_models import Language

LAYERS = {"layer_specs": [{"patterns": [".*up.weight"], "partition_type": "column"}]}
LAYERS["layer_specs"].append({"patterns": [".*down.weight"], "partition_type": "row"})


class Reads(nn.Module):
    """A split pair of layers; takes its arguments in every way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.block = nn.ModuleDict({"up": nn.Linear(4, 6), "down": nn.Linear(6, 4)})

    def forward(self, x: Tensor, mask: Any = None, **more: Any) -> Tensor:
        mean: Tensor = self.block["down"](torch.tanh(self.block["up"](x))).square().mean()
        return mean


def engine_of(stage: int = 0, accumulation: int = 1) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": stage},
        "tensor_parallel": {"autotp_size": 2, "partition_config": LAYERS},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
    }
    return zengine.initialize(model=Reads(), config=config)[0]


def weights(engine: zengine.Engine) -> list[float]:
    return torch.cat([value.reshape(-1) for value in engine.module.state_dict().values()]).tolist()


def one_step(engine: zengine.Engine, *args: Any, **kwargs: Any) -> bool:
    report = None
    for _ in range(engine.gradient_accumulation_steps()):
        engine.backward(engine(*args, **kwargs))
        report = engine.step()
    return bool(report)


def rows(seed: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))


def other_contents(stage: int) -> list[Any]:
    engine, rank = engine_of(stage), zcomm.group_rank()
    found: list[Any] = [one_step(engine, rows(0)), weights(engine)]
    with pytest.raises(zengine.RanksDisagree) as caught:
        one_step(engine, rows(1 + rank))
    found += [weights(engine) == found[1], str(caught.value), one_step(engine, rows(2))]
    engine.close()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_other_contents_are_told_before_the_weights_move(stage: int) -> None:
    for first, _, stayed, message, goes_on in run_ranks(other_contents, 2, stage):
        assert first
        assert stayed
        assert goes_on
        assert message.startswith("x of forward pass 1 of the step is (2, 4) float32 with digest ")
        assert " on rank 0 and (2, 4) float32 with digest " in message
        assert "on rank 1. These ranks split the layers of one model, so they need the same batches" in message
        assert "get_data_parallel_rank()" in message


def told(*cases: str) -> list[str]:
    """What is said of each case; "" for nothing."""
    engine, rank, found = engine_of(accumulation=2), zcomm.group_rank(), []
    x, mask = rows(0), {"rows": torch.ones(2, dtype=torch.bool), "ids": [torch.arange(3), torch.arange(4)]}
    for case in cases:
        batches: list[tuple[tuple[Any, ...], dict[str, Any]]] = [((x, mask), {}), ((x,), {"labels": x})]
        if case == "a nest" and rank:
            batches[0] = ((x, {**mask, "ids": [torch.arange(3), torch.arange(1, 5)]}), {})
        elif case == "a keyword" and rank:
            batches[1] = ((x,), {"labels": x + 1})
        elif case == "a dtype":
            batches[0] = ((x, x.half().double() if rank else x.half()), {})
        elif case == "a shape":
            batches[0] = ((x, x.view(4, 2) if rank else x), {})
        elif case == "another order" and rank:
            batches[0] = ((x, {**mask, "ids": [torch.arange(3), torch.tensor([1, 0, 2, 3])]}), {})
        elif case == "missing" and rank:
            batches[1] = ((x,), {})
        elif case == "zeros and NaN":
            batches[0] = (
                (x, torch.tensor([-0.0, float("nan")]) if rank else -torch.tensor([-0.0, float("nan")])),
                {},
            )
        elif case == "not contiguous":
            batches[0] = ((x, x.t().contiguous().t() if rank else x), {})
        elif case == "no tensors":
            batches[0] = ((x, f"rank {rank}"), {})
        try:
            for args, kwargs in batches:
                engine.backward(engine(*args, **kwargs))
                engine.step()
            found.append("")
        except zengine.RanksDisagree as error:
            found.append(str(error))
    engine.close()
    return found


DIFFERENT = {
    "a nest": "mask['ids'][1] of forward pass 1 of the step is (4,) int64",
    "a keyword": "labels of forward pass 2 of the step is (2, 4) float32",
    "a dtype": "mask of forward pass 1 of the step is (2, 4) float16 with digest",
    "a shape": "on rank 0 and (4, 2) float32",
    "another order": "mask['ids'][1] of forward pass 1",
    "missing": "labels of forward pass 2 of the step is (2, 4) float32",
}
ALIKE = ("zeros and NaN", "not contiguous", "no tensors", "nothing")


def test_the_argument_is_named() -> None:
    for found in run_ranks(told, 2, *DIFFERENT):
        for message, expected in zip(found, DIFFERENT.values()):
            assert expected in message
    assert "on rank 0 and missing on rank 1" in found[-1]


def test_there_is_no_false_alarm() -> None:
    assert run_ranks(told, 2, *ALIKE) == [[""] * len(ALIKE)] * 2


def replicas(where: int) -> list[str]:
    """Two tensor pairs with other data each; from the third step on rank `where` has a batch of its own."""
    engine, found = engine_of(2), []
    for step in range(3):
        seed = 10 * step + engine.parts.groups.get_data_parallel_rank()
        try:
            one_step(engine, rows(99 if step == 2 and zcomm.group_rank() == where else seed))
            found.append("")
        except zengine.RanksDisagree as error:
            found.append(str(error))
    engine.close()
    return found


@pytest.mark.parametrize("where", [0, 3])
def test_data_ranks_have_other_data_and_all_ranks_are_told_of_one_pair(where: int) -> None:
    for first, second, third in run_ranks(replicas, 4, where):
        assert first == second == ""
        pair = (0, 1) if where == 0 else (2, 3)
        assert f"on rank {pair[0]} and (2, 4)" in third
        assert f"on rank {pair[1]}. " in third


def later(step: int) -> str:
    """A difference that begins in that step."""
    engine, rank = engine_of(), zcomm.group_rank()
    try:
        for index in range(step + EVERY):
            one_step(engine, rows(index + (rank if index >= step else 0)))
    except zengine.RanksDisagree:
        return f"step {index}"
    return ""


@pytest.mark.parametrize(("step", "told_in"), [(FIRST - 1, FIRST - 1), (FIRST, EVERY)])
def test_a_difference_that_begins_later_is_told_in_the_next_step_that_is_compared(step: int, told_in: int) -> None:
    assert run_ranks(later, 2, step) == [f"step {told_in}"] * 2


def evaluates() -> bool:
    """Without gradients nothing is compared."""
    engine = engine_of()
    with torch.no_grad():
        engine(rows(zcomm.group_rank()))
    return one_step(engine, rows(0))


def test_evaluation_is_not_compared() -> None:
    assert run_ranks(evaluates, 2) == [True, True]


def messages() -> list[str]:
    """Labels of the messages of a boundary."""
    engine, log = engine_of(), []
    one_step(engine, rows(0))
    engine.backward(engine(rows(0)))
    with zcomm.traced(log.append):
        engine.step()
    return [record.label for record in log]


def test_batches_that_are_alike_cost_no_message() -> None:
    assert run_ranks(messages, 2) == [["sums over model-parallel ranks"]] * 2


def rates(case: str) -> list[str]:
    """One of two tensor ranks has another rate, or unfreezes a layer alone."""
    rank, model, found = zcomm.group_rank(), Reads(), []
    model.block["down"].requires_grad_(case != "unfrozen")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "tensor_parallel": {"autotp_size": 2, "partition_config": LAYERS},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine = zengine.initialize(model=model, optimizer=optimizer, config=config)[0]
    for step in range(2):
        if step and rank and case == "rate":
            optimizer.param_groups[0]["lr"] = 0.02
        if step and rank and case == "unfrozen":
            model.block["down"].requires_grad_(True)
        try:
            one_step(engine, rows(0))
            found.append("")
        except zengine.RanksDisagree as error:
            found.append(str(error))
    return found


def test_another_rate_on_one_tensor_rank_is_told() -> None:
    for first, second in run_ranks(rates, 2, "rate"):
        assert first == ""
        assert "param_groups[0]['lr'] is 0.01 on rank 0 and 0.02 on rank 1" in second


def test_a_parameter_that_one_tensor_rank_alone_unfreezes_is_told() -> None:
    for first, second in run_ranks(rates, 2, "unfrozen"):
        assert first == ""
        assert "block.down.weight is frozen on rank 0 and trained on rank 1" in second


def test_whole_models_are_not_looked_at() -> None:
    assert not any(type(feature) is SameBatch for feature in small_engine()._features)


def names(model: nn.Module) -> tuple[str, ...]:
    feature = SameBatch()
    feature.attach(small_engine(model))
    return feature.names


def test_arguments_have_the_names_that_forward_gives_them() -> None:
    assert names(Language()) == ("tokens",)
    assert names(Reads()) == ("x", "mask")
    assert names(nn.Sequential(nn.Linear(3, 1))) == ("input",)
