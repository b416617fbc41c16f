"""Optimizer state by name: saving and loading."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import zpartition
from zpartition.layout.address import LazyShard


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _train(partition, optimizer, num_steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        partition.module(torch.randn(4, 5, generator=generator)).square().mean().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()


def _trained(make, num_steps=2):
    model = _model()
    optimizer = make(model.parameters())
    partition = zpartition.shard(model, optimizer)
    _train(partition, optimizer, num_steps)
    return partition, optimizer


def _saved(partition, optimizer):
    """What a checkpoint would hold: {(key, parameter): shard with its values}."""
    shards = zpartition.state_shards(optimizer, partition.holders)
    return {(key, s.name): (s.global_shape, s.span, s.tensor.clone()) for key, s in shards}


def _load(partition, optimizer, saved):
    """As a checkpoint would do it."""

    def kinds_of(name):
        mine = {key: value for (key, owner), value in saved.items() if owner == name}
        return {k: (values.dtype, None if k == "step" else shape) for k, (shape, _, values) in mine.items()}

    staged = zpartition.make_state(optimizer, partition.holders, kinds_of)
    for key, shard in staged.shards():
        shard.tensor.copy_(saved[key, shard.name][2])
    staged.hand_over()


def _same(a, b):
    return a.keys() == b.keys() and all(a[k][:2] == b[k][:2] and torch.equal(a[k][2], b[k][2]) for k in a)


def test_state_is_addressed_by_parameter():
    partition, optimizer = _trained(lambda p: torch.optim.AdamW(p, lr=0.01))
    saved = _saved(partition, optimizer)
    assert {key for key, _ in saved} == {"step", "exp_avg", "exp_avg_sq"}
    assert saved["exp_avg", "0.weight"][:2] == ((7, 5), (0, 35))
    assert saved["step", "0.weight"][2].item() == 2


@pytest.mark.parametrize("kind", ["AdamW", "Adafactor", "coded"])
def test_what_was_saved_comes_back_bit_for_bit_and_the_run_goes_on(kind, coded_momentum):
    makers = {
        "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
        "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),  # rows and columns: state of other shapes
        "coded": coded_momentum,
    }
    partition, optimizer = _trained(makers[kind])
    saved = copy.deepcopy(_saved(partition, optimizer))
    other, restored = _trained(makers[kind], num_steps=3)
    _load(other, restored, saved)
    assert _same(_saved(other, restored), saved)
    for ours, theirs in zip(partition.module.parameters(), other.module.parameters()):
        theirs.data.copy_(ours.data)
    _train(partition, optimizer, 1)
    _train(other, restored, 1)
    assert all(torch.equal(a, b) for a, b in zip(partition.module.parameters(), other.module.parameters()))


def test_each_parameter_has_its_own_count_and_one_without_updates_has_nothing():
    partition, optimizer = _trained(torch.optim.AdamW, 0)
    for layers in ([0, 2], [0], [0]):
        hidden = torch.ones(4, 5)
        for index in layers:
            hidden = partition.module[index](hidden)
        hidden.sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    saved = _saved(partition, optimizer)
    counts = {name: value.item() for (key, name), (_, _, value) in saved.items() if key == "step"}
    assert counts == {"0.weight": 3, "0.bias": 3, "2.weight": 1, "2.bias": 1}
    _load(partition, optimizer, saved)
    assert _same(_saved(partition, optimizer), saved)
    left = {place: found for place, found in saved.items() if place[1] != "2.bias"}
    _load(partition, optimizer, left)
    assert _same(_saved(partition, optimizer), left)
    alike = _saved(*_trained(torch.optim.AdamW))
    _load(partition, optimizer, alike)
    (entry,) = optimizer.state.values()
    assert entry["step"].dim() == 0
    assert entry.keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_numbers_are_memory_as_all_other_shards_are():
    for num_steps, shard in [(n, s) for n in (1, 2) for _, s in zpartition.state_shards(*_state_after(n))]:
        assert shard.tensor.view(torch.uint8).numel() == shard.tensor.nbytes, (num_steps, shard.name)


def _state_after(num_steps):
    """Of a run whose second step leaves a layer out."""
    partition, optimizer = _trained(torch.optim.AdamW, 1)
    if num_steps == 2:
        partition.module[0](torch.ones(4, 5)).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
    return optimizer, partition.holders


def test_the_optimizer_keeps_its_state_until_the_loaded_one_is_handed_over():
    partition, optimizer = _trained(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    before = dict(optimizer.state)
    kinds = {"momentum_buffer": (torch.float32, (1,))}
    staged = zpartition.make_state(optimizer, partition.holders, lambda _name: kinds)
    assert not any(shard.tensor.any() for _, shard in staged.shards())
    assert dict(optimizer.state) == before
    staged.hand_over()
    assert not any(state["momentum_buffer"].any() for state in optimizer.state.values())


def test_loaded_state_is_in_the_order_of_the_parameter_groups():
    def made():
        model = _model()
        optimizer = torch.optim.Adam([{"params": [each]} for each in model.parameters()])
        partition = zpartition.shard(model, optimizer)
        _train(partition, optimizer, 1)
        return partition, optimizer

    (partition, optimizer), (saved_partition, saved) = made(), made()
    _load(partition, optimizer, _saved(saved_partition, saved))
    wanted = [param for group in optimizer.param_groups for param in group["params"]]
    assert [id(param) for param in optimizer.state] == [id(param) for param in wanted]
    assert len(wanted) == 4


def test_coded_state_is_decoded_when_it_is_read_and_not_before(coded_momentum):
    partition, optimizer = _trained(coded_momentum)
    shards = dict(zpartition.state_shards(optimizer, partition.holders))
    shard = shards["momentum"]
    assert isinstance(shard, LazyShard)
    before = shard.tensor
    for state in optimizer.state.values():
        state["codes"] += 1
    assert not torch.equal(shard.tensor, before)
    assert shard.tensor.shape == (shard.span[1] - shard.span[0],)


def test_state_that_the_optimizer_rejects_is_its_own_error(coded_momentum):
    partition, optimizer = _trained(coded_momentum)
    staged = zpartition.make_state(optimizer, partition.holders, lambda _name: {"step": (torch.float32, None)})
    with pytest.raises(ValueError, match="momentum is missing"):
        staged.hand_over()


def test_state_that_no_checkpoint_can_hold_is_named():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer)
    optimizer.state[partition.holders[0].tensor]["history"] = [1, 2]
    with pytest.raises(TypeError, match=r"state 'history' of SGD .* is a list"):
        list(zpartition.state_shards(optimizer, partition.holders))
