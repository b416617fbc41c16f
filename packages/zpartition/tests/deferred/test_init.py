"""Deferred initialization: weights equal those of a plain build, and each rank makes only its part."""

from __future__ import annotations

import unittest.mock
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.deferred.init import Deferred


class Model(nn.Module):
    """Every kind of initialisation: by layers, by their parent, decompositions, rejection, values from lists."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 20), nn.Linear(20, 8)
        self.embed = nn.Embedding(7, 10)
        self.conv = nn.Conv1d(3, 4, 2)
        self.gru = nn.GRU(5, 6)
        self.scale = nn.Parameter(torch.randn(4, 4) * 0.02 + torch.arange(4))
        self.blend = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("freq", 1.0 / (100 ** (torch.arange(0, 10, 2).float() / 10)))
        self.register_buffer("mask", torch.ones(5, 5, dtype=torch.bool).tril())
        self.tied = nn.Linear(10, 7, bias=False)
        self.tied.weight = self.embed.weight
        nn.init.orthogonal_(self.second.weight)
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        self.apply(self._again)
        with torch.no_grad():
            self.second.weight[2:4].mul_(0.5)

    def _again(self, module: nn.Module) -> None:
        if module is self.first:
            module.weight.data.normal_(0, 0.02)
            nn.init.zeros_(module.bias)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.first(self.embed(tokens) * self.freq.sum() * self.scale.mean())
        return self.second(x).square().mean() * self.blend.sum()


def plain(seed: int = 3) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(seed)
    return Model().state_dict(), torch.rand(3)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    deferred = Deferred.of(model, torch.device("cpu"))
    assert deferred is not None
    deferred.fill(lambda name, values: found.update({name: values.clone()}), None)
    return found


def test_the_values_are_those_of_a_plain_build_and_so_is_what_is_drawn_next() -> None:
    expected, after = plain()
    torch.manual_seed(3)
    with zpartition.Init():
        model = Model()
    assert model.first.weight.device.type == "meta"
    found = values_of(model)
    assert torch.equal(torch.rand(3), after)
    for name, tensor in expected.items():
        if name not in ("blend", "tied.weight"):  # real at once; another name of the embedding
            assert torch.equal(found[name], tensor), name
    assert torch.equal(model.blend, expected["blend"])


def test_a_seed_inside_the_block_counts() -> None:
    def build() -> list[nn.Module]:
        layers = [nn.Linear(4, 4)]
        torch.manual_seed(11)
        return [*layers, nn.Linear(4, 4), nn.Linear(4, 4)]

    torch.manual_seed(5)
    expected = nn.Sequential(*build()).state_dict()
    torch.manual_seed(5)
    with zpartition.Init():
        model = nn.Sequential(*build())
    found = values_of(model)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_same_seed_twice_gives_the_same_numbers_twice() -> None:
    def build() -> nn.ModuleList:
        layers = []
        for seed in (4, 4, 5, 4):
            torch.manual_seed(seed)
            layers.append(nn.Linear(3, 3))
        return nn.ModuleList(layers)

    expected = build().state_dict()
    following = torch.rand(3)
    state = torch.get_rng_state()
    with zpartition.Init():
        model = build()
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(4).get_state()), "as if nothing had been drawn"
    found = values_of(model)
    assert torch.equal(torch.rand(3), following)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(found["0.weight"], found["3.weight"])
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_cast_after_the_block_is_carried_out_too() -> None:
    expected, _ = plain()
    torch.manual_seed(3)
    with zpartition.Init():
        model = Model()
    with zpartition.recording(model):
        model.to(torch.bfloat16)
    found = values_of(model)
    assert torch.equal(found["first.weight"], expected["first.weight"].bfloat16())


def test_nothing_outlives_the_block() -> None:
    before = nn.init._no_grad_trunc_normal_
    with pytest.raises(ArithmeticError), zpartition.Init():
        raise ArithmeticError
    assert nn.init._no_grad_trunc_normal_ is before
    assert torch.empty(2).device.type == "cpu"
    with zpartition.Init(enabled=False):
        assert nn.Linear(2, 2).weight.device.type == "cpu"


def test_memory_of_what_is_drawn_twice_is_given_back_at_once() -> None:
    with zpartition.Init() as init:
        model = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20))
        for layer in model:
            layer.weight.data.normal_()
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        found = original(*args, **kwargs)
        made.append(weakref.ref(found))
        alive.append(sum(reference() is not None for reference in made))
        return found

    with unittest.mock.patch.object(torch, "empty", counted):
        init.recorded.replay(lambda key, content: None, wanted=frozenset(init.recorded.storages))
    assert len(made) == 60, "made, drawn by the layer, drawn again"
    assert max(alive) <= 2


def _trains(stage: int, deferred: bool, seed_by_rank: bool) -> tuple[dict[str, torch.Tensor], float]:
    torch.manual_seed(zcomm.group_rank() if seed_by_rank else 3)
    with zpartition.Init(enabled=deferred):
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = ZeroPolicy(stage=stage, unit_numel=300, persist_numel=15, max_live_numel=0)
    partition = zpartition.shard(model, optimizer, policy=policy)
    loss = torch.zeros(())
    for _ in range(3):
        with partition.micro_step():
            loss = model(torch.arange(6))
            loss.backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, loss.item()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_deferred_model_trains_like_a_plain_one(stage: int) -> None:
    expected, loss = run_ranks(_trains, 2, stage, False, False)[0]
    for found, other in run_ranks(_trains, 2, stage, True, False):
        assert other == loss
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_ranks_with_other_seeds_take_rank_0s() -> None:
    first, second = run_ranks(_trains, 2, 3, True, True)
    expected = run_ranks(_trains, 2, 3, False, True)[0]
    assert first[1] == second[1] == expected[1]
    assert all(torch.equal(first[0][name], tensor) for name, tensor in expected[0].items())


def test_a_meta_model_that_nobody_knows_is_rejected_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(
        ValueError, match=r"weight is on the meta device.*Build the module inside zpartition.Init\(\)"
    ):
        zpartition.shard(model)


def test_what_depends_on_a_value_cannot_be_built() -> None:
    with pytest.raises(RuntimeError, match="meta"), zpartition.Init():
        torch.randn(3).sum().item()


def test_a_number_that_needs_no_random_ones_is_there_while_the_module_is_built():
    with zpartition.Init():
        rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
        table = torch.arange(6.0).view(2, 3) + 1
        table[1, 2] = 40.0
        assert int(table.max()) == 40
        assert bool((table.sum() == 55).item())
        with pytest.raises(RuntimeError, match="meta"):
            torch.rand(3).sum().item()
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3])


def test_two_models_that_begin_with_the_same_numbers_are_told_of() -> None:
    torch.manual_seed(5)
    with zpartition.Init():
        actor = nn.Linear(3, 3)
    with (
        pytest.warns(UserWarning, match="draws the same random numbers as another model that was built inside Init"),
        zpartition.Init(),
    ):
        nn.Linear(3, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with zpartition.Init():
            nn.Embedding.from_pretrained(torch.ones(2, 2))  # draws nothing
        torch.manual_seed(6)
        with zpartition.Init():
            nn.Linear(3, 3)
        torch.manual_seed(5)
        values_of(actor)
        with zpartition.Init():
            nn.Linear(3, 3)
