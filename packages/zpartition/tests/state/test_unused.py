"""Parameters that no rank used keep their values, in every format of state."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zpartition
from zpartition.state.unused import preserve_unused


def _partition(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 10), nn.Linear(10, 30))
    optimizer = make(model.parameters())
    return zpartition.shard(model, optimizer), optimizer


def _step(partition, optimizer, rests=False):
    """One step; with `rests` the first layer is not used."""
    generator = torch.Generator().manual_seed(5)
    first, second = partition.module
    hidden = torch.randn(4, 10, generator=generator) if rests else first(torch.randn(4, 9, generator=generator))
    second(hidden).square().mean().backward()
    partition.finish_gradients()
    partition.apply(optimizer.step, any_unused=rests)
    partition.zero_grad()


def _of(partition, optimizer, name):
    """Weights and state of the parameters whose names begin so."""
    shards = zpartition.state_shards(optimizer, partition.holders)
    state = {(key, s.name): s.tensor.clone() for key, s in shards if s.name.startswith(name) and key != "step"}
    return state | {(n,): p.detach().clone() for n, p in partition.params.items() if n.startswith(name)}


@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_weights_and_state_rest_while_others_move(kind, coded_momentum):
    make = coded_momentum if kind == "coded" else lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5)
    partition, optimizer = _partition(make)
    _step(partition, optimizer)
    unused, moving = _of(partition, optimizer, "0"), _of(partition, optimizer, "1")
    _step(partition, optimizer, rests=True)
    for key, value in _of(partition, optimizer, "0").items():
        exact = kind == "plain" or len(key) == 1
        torch.testing.assert_close(value, unused[key], rtol=0, atol=0 if exact else 1e-4)
    assert all(not torch.equal(value, moving[key]) for key, value in _of(partition, optimizer, "1").items())


@pytest.mark.parametrize("kind", ["plain", "coded"])
def test_state_made_by_the_very_step_is_zero_for_what_rested(kind, coded_momentum):
    make = coded_momentum if kind == "coded" else lambda p: torch.optim.Adam(p, lr=0.1)
    partition, optimizer = _partition(make)
    _step(partition, optimizer, rests=True)
    found = _of(partition, optimizer, "0")
    assert all(not value.any() for key, value in found.items() if len(key) == 2)


def test_without_an_optimizer_weights_alone_are_put_back():
    partition, _ = _partition(lambda p: torch.optim.SGD(p, lr=0.1))
    holder = partition.holders[0]
    piece = holder.pieces[0]
    before = holder.tensor.detach().clone()
    with preserve_unused(None, [(holder, piece)]):
        holder.tensor.data += 1
    changed = holder.tensor.detach() != before
    assert not changed[piece.offset : piece.offset + piece.numel].any()
    assert changed.any()
