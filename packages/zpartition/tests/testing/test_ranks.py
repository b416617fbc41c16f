"""Comparing two runs finds every difference, down to one state of one parameter; clipping is torch's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zpartition.layout.policy import NOTHING
from zpartition.testing import Net, backward, clip, differing, fingerprint, losses_of, make, train


def test_two_runs_are_alike_until_one_number_is_not() -> None:
    found = []
    for _ in range(2):
        model, optimizer, partition = make(NOTHING, 0, torch.float32)
        train(partition, model, optimizer, range(2), 1)
        found.append(fingerprint(partition, model))
        partition.close()
    assert not differing(*found)
    found[0]["exp_avg.last.bias"][0] += 1
    assert differing(*found) == ["exp_avg.last.bias"]


def test_losses_of_steps_are_those_of_a_plain_loop() -> None:
    model, _, partition = make(NOTHING, 1, torch.float32)
    x = torch.arange(48.0).view(2, 24) / 48
    found = losses_of(partition, lambda: model(x, True), 3)
    partition.close()
    plain, expected = Net(torch.float32), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss = plain(x, True)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert found == pytest.approx(expected, rel=1e-6)
    assert expected[0] > expected[2]


def test_clipping_is_torch_s() -> None:
    model, _optimizer, partition = make(NOTHING, 2, torch.float32)
    backward(partition, model, 0, 1)
    norm = clip(partition, 0.01)
    clipped = torch.cat([storage.master.grad for storage in partition.storages])
    partition.close()
    plain, _, other = make(NOTHING, 0, torch.float32)
    other.close()
    generator = torch.Generator().manual_seed(0)
    plain(torch.randn(4, 24, generator=generator), True).backward()
    assert norm == pytest.approx(float(nn.utils.clip_grad_norm_(plain.parameters(), 0.01)), rel=1e-6)
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])
    assert norm > 0.01
    assert float(clipped.square().sum()) == pytest.approx(float(expected.square().sum()), rel=1e-5)
