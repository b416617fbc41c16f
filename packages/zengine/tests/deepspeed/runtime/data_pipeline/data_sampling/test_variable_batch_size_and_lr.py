"""Batches by tokens and scaled rates: equal to DeepSpeed 0.19.8's, and DeepSpeed's example."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zengine.deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    batch_by_seqlens,
    dataloader_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size,
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed,
    lr_scheduler_for_variable_batch_size,
    scale_lr,
)

GOLDEN = json.loads((Path(__file__).parents[3] / "golden/deepspeed_0_19_8.json").read_text())


def lengths() -> list[int]:
    rng = random.Random(3)
    return [rng.randrange(1, 30) for _ in range(60)]


@pytest.mark.parametrize("order", ["dataloader", "random", "seqlen"])
@pytest.mark.parametrize("same", [False, True])
@pytest.mark.parametrize(("least", "most"), [(1, None), (2, 4)])
def test_batches_are_those_of_deepspeed(order: str, same: bool, least: int, most: int | None) -> None:
    options: dict[str, Any] = {
        "min_batch_size": least,
        "max_batch_size": most,
        "sequence_picking_order": order,
        "effective_batch_size": 4,
        "required_microbatches_of_same_size": same,
        "seed": 5,
    }
    wanted = GOLDEN["batches"][f"{order}{same}{least}"]
    if wanted == "error":
        with pytest.raises(ValueError, match="do not make one batch of 4 micro-batches of at most 40 tokens"):
            batch_by_seqlens(lengths(), 40, **options)
        return
    micro, sizes, longest = batch_by_seqlens(lengths(), 40, **options)
    assert [[list(each) for each in micro], sizes, longest] == wanted


@pytest.mark.parametrize("base", ["opt", "sched"])
def test_rates_are_those_of_deepspeed(base: str) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    given: Any = optimizer if base == "opt" else torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    schedule = lr_scheduler_for_variable_batch_size(4, [2, 6, 4], None, given)
    rates = []
    for epoch in range(2):
        if base == "opt" or epoch:
            schedule.step(0)
        for _ in range(5):
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
    torch.testing.assert_close(rates, GOLDEN["rates"][base], atol=1e-6, rtol=0)
    state = schedule.state_dict()
    other = lr_scheduler_for_variable_batch_size(1, [1], None, optimizer)
    if base == "opt":
        other.load_state_dict(state)
        assert (other.batch_sizes, other.last_epoch, other.base_batch_size) == ([2, 6, 4], 5, 4)


def test_the_loader_of_a_rank_is_that_of_deepspeed() -> None:
    data = [torch.arange(length) for length in lengths()]
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    loader, _, arguments = get_dataloader_and_lr_scheduler_for_variable_batch_size(
        data,
        lengths(),
        40,
        4,
        dataloader_batch_size=2,
        dataloader_rank=1,
        dataloader_num_replicas=2,
        dataloader_collate_fn=lambda batch: [len(sample) for sample in batch],
        lr_scheduler_or_optimizer=optimizer,
    )
    assert list(loader) == GOLDEN["loader"]
    assert {"dataset", "batch_size", "collate_fn", "data_sampler", "pin_memory"} < set(arguments)


def test_wrong_arguments_are_named() -> None:
    assert scale_lr(4, 16, 0.1, "sqrt") == pytest.approx(0.2)
    assert scale_lr(4, 16, 0.1, None) == 0.1
    with pytest.raises(ValueError, match="one of linear, sqrt, none, got 'cubic'"):
        scale_lr(4, 16, 0.1, "cubic")
    with pytest.raises(ValueError, match="must be random, seqlen or dataloader"):
        batch_by_seqlens([1], 2, sequence_picking_order="last")
    with pytest.raises(ValueError, match="needs sample_padding_fn="):
        dataloader_for_variable_batch_size([], [], [], required_microbatches_of_same_seqlen=True)
    with pytest.raises(TypeError, match="must be a schedule or an optimizer, got int"):
        lr_scheduler_for_variable_batch_size(1, [1], None, 3)


# -- DeepSpeed's example: examples/training/data_efficiency/variable_batch_size_and_lr -----------------------------


class Sequences(torch.utils.data.Dataset[Any]):
    """Sequences of random lengths, with their sum as target."""

    def __init__(self, count: int) -> None:
        rng = random.Random(0)
        self.seqs = [torch.ones(rng.randrange(5, 15), 5) for _ in range(count)]

    def __len__(self) -> int:
        return len(self.seqs)

    def __getitem__(self, index: int) -> Any:
        return self.seqs[index], self.seqs[index].sum()

    @staticmethod
    def collate(batch: list[Any]) -> Any:
        seqs, labels = zip(*batch)
        return nn.utils.rnn.pad_sequence(list(seqs), batch_first=True), torch.stack(labels)

    @staticmethod
    def measure(batch: Any) -> torch.Tensor:
        return (batch[0].sum(dim=2) > 0).sum(dim=1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.out = nn.MultiheadAttention(5, 1, batch_first=True), nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.heads(x, x, x)[0]).sum(dim=(1, 2))


@pytest.mark.parametrize("is_enabled", [False, True])
def test_deepspeeds_example_trains(is_enabled: bool, tmp_path: Path) -> None:
    batching = {"enabled": True, "metrics_path": str(tmp_path), "lr_scaling_method": "linear", "max_tokens": 40}
    batching |= {"min_batch_size": 1, "max_batch_size": 10, "sequence_picking_order": "dataloader", "verbose": False}
    config = {
        "train_batch_size": 4,
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.001}},
        "data_efficiency": {
            "enabled": True,
            "seed": 42,
            "data_sampling": {
                **({"enabled": True} if is_enabled else {}),
                "num_workers": 0,
                "pin_memory": False,
                "dynamic_batching": batching,
            },
        },
    }
    torch.manual_seed(0)
    data = Sequences(120)
    engine, *_ = deepspeed.initialize(config=config, model=Attention())
    loader, schedule, _ = get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
        dataset=data, engine=engine, dataloader_collate_fn=Sequences.collate, batch_seqlens_fn=Sequences.measure
    )
    assert (tmp_path / "seqlen/seqlen_sample_to_metric.idx").exists()
    _, sizes, _ = batch_by_seqlens([len(seq) for seq in data.seqs], 40, max_batch_size=10, effective_batch_size=4)
    losses, rates = [], []
    for _ in range(2):
        schedule.step(0)
        for number, (seqs, labels) in enumerate(loader):
            rates.append(engine.get_lr()[0])
            loss = (engine(seqs.to(engine.device)) - labels.to(engine.device)).square().mean() / 1000
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
            if number % 2:  # a step has two micro-batches
                schedule.step()
    wanted = [0.001 * sizes[step % len(sizes)] / 4 for step in range(len(sizes)) for _ in range(2)]
    assert rates == pytest.approx(2 * wanted[: len(rates) // 2])
    assert losses[-1] < losses[0]
    with pytest.raises(ValueError, match="which belongs to another dataset"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(Sequences(7), engine)


def test_an_engine_without_the_section_is_told() -> None:
    engine, *_ = deepspeed.initialize(config={"train_batch_size": 1}, model=nn.Linear(2, 2))
    with pytest.raises(ValueError, match="dynamic_batching: set enabled to true"):
        get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed([], engine)
