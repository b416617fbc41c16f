"""Blocks chosen by name are checkpointed, at every stage, until close."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.activations import CheckpointedBlocks, Checkpointing


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), 0

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.inner(x)) * scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layers = nn.Linear(4, 8), nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return x.square().mean()


def gradients(net: nn.Module) -> list[Tensor]:
    net.zero_grad()
    torch.manual_seed(1)
    net(torch.ones(3, 4)).backward()
    return [param.grad.clone() for param in net.parameters()]


def test_outermost_matches_are_recomputed_and_close_restores_classes() -> None:
    net = Net()
    wanted, names = gradients(net), list(net.state_dict())
    blocks = CheckpointedBlocks.of(net, ["layers.*", "layers.0.inner"], Checkpointing())
    assert list(blocks.modules) == ["layers.0", "layers.1", "layers.2"]
    assert isinstance(net.layers[0], Block)
    for each in (net, copy.deepcopy(net)):
        assert all(torch.equal(a, b) for a, b in zip(gradients(each), wanted))
    assert [layer.calls for layer in net.layers] == [3] * 3
    assert list(net.state_dict()) == names
    blocks.close()
    blocks.close()
    assert {type(layer) for layer in net.layers} == {Block}
    assert all(torch.equal(a, b) for a, b in zip(gradients(net), wanted))
    assert [layer.calls for layer in net.layers] == [4] * 3


def test_a_pattern_without_a_module_raises_unless_it_matches_elsewhere() -> None:
    net = Net()
    with pytest.raises(ValueError, match=r"pattern 'layer.\*' of activation checkpoints matches none of .*layers.0"):
        CheckpointedBlocks.of(net, ["layers.1", "layer.*"], Checkpointing())
    assert type(net.layers[1]) is Block
    assert list(
        CheckpointedBlocks.of(net, ["layers.1", "layer.*"], Checkpointing(), elsewhere=["layer.0"]).modules
    ) == ["layers.1"]


def at_every_stage() -> list[int]:
    calls = []
    for stage in (0, 3):
        results = []
        for patterns in ([], ["layers.*"]):
            model = Net()
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            policy = ZeroPolicy(stage=stage, unit_numel=100, persist_numel=4, max_live_numel=0)
            partition = zpartition.shard(model, optimizer, policy=policy)
            blocks = CheckpointedBlocks.of(model, patterns, Checkpointing())
            for step in range(3):
                torch.manual_seed(step)
                with partition.micro_step():
                    model(torch.randn(3, 4)).backward()
                partition.finish_gradients()
                partition.apply(optimizer.step)
                partition.zero_grad()
            blocks.close()
            calls.append(model.layers[0].calls)
            results.append({name: value.clone() for name, value in model.state_dict().items()})
            partition.close()
        assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])
    return calls


def test_two_ranks_train_the_same_at_stages_0_and_3() -> None:
    assert run_ranks(at_every_stage, 2) == [[3, 6, 3, 6]] * 2


def test_pickles_and_copies_are_plain_models() -> None:
    net, file = Net(), io.BytesIO()
    wanted = gradients(net)
    CheckpointedBlocks.of(net, ["layers.*"], Checkpointing())
    torch.save(net, file)
    file.seek(0)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(net)):
        assert {type(layer) for layer in other.layers} == {Block}
        assert all(torch.equal(a, b) for a, b in zip(gradients(other), wanted))
        assert [layer.calls for layer in other.layers] == [2] * 3  # one of them was the original's
    assert type(net.layers[0]) is not Block
