"""Share of a forward pass that backward recomputes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zengine.flops.recomputation import ObserverPhase, Probe


class Net(nn.Module):
    """Two large layers of which some are checkpointed."""

    def __init__(self, checkpointed, reentrant=False):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.checkpointed, self.reentrant = checkpointed, reentrant

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            again = index < self.checkpointed
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if again else layer(x)
        return x.sum()


class Block(nn.Module):
    """Attention without heads, and a perceptron of a width of its own."""

    def __init__(self, width, wide):
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

    def attention(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return (query @ key.transpose(1, 2)).softmax(-1) @ value

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class LanguageModel(nn.Module):
    """Most parameters are those of an embedding, and of a head that may be tied to it."""

    def __init__(self, checkpointed, *, wide=(32, 32, 32, 32), vocabulary=4000, tied=False, part=None):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, 8)
        self.layers = nn.ModuleList(Block(8, each) for each in wide)
        self.head = nn.Linear(8, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.checkpointed, self.part = checkpointed, part

    def forward(self, tokens):
        x = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            if index not in self.checkpointed:
                x = layer(x)
            elif self.part == "mlp":
                x = x + layer.attention(x)
                x = x + checkpoint(layer.mlp, x, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=True)  # without the early stop of the other kind
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def watch(model, micro_steps=1, batch=None):
    """What a probe finds in a step."""
    probe = Probe.of(model)
    for _ in range(micro_steps):
        probe.forward_begin()
        loss = model(torch.ones(1, 4, requires_grad=True) if batch is None else batch)
        loss.backward()
    return probe, probe.finish()


def counted(model, tokens):
    """FLOPs of a step, as torch counts them."""
    with FlopCounterMode(display=False) as counter:
        model(tokens).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(("checkpointed", "share"), [(0, 0.0), (1, 0.25), (2, 0.5), (4, 1.0)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_the_share_is_that_of_the_layers_that_ran_again(checkpointed, share, reentrant):
    model = Net(checkpointed, reentrant)
    probe, found = watch(model)
    assert found == (share,)
    assert probe.finish() == ()  # once
    assert not any(layer._forward_pre_hooks for layer in model.layers)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("checkpointed", "share"), [((), 0.0), ((0,), 0.25), ((0, 2), 0.5), ((0, 1, 2, 3), 1.0)])
def test_neither_a_large_embedding_nor_the_head_hides_that_all_layers_run_again(checkpointed, share, tied):
    model = LanguageModel(checkpointed, tied=tied)
    assert sum(param.numel() for param in model.layers.parameters()) < model.embed.weight.numel() / 2
    assert watch(model, batch=torch.arange(6).view(1, 6))[1] == (share,)


@pytest.mark.parametrize("part", [None, "mlp"])
@pytest.mark.parametrize("checkpointed", [(), (0,), (1, 3), (0, 1, 2, 3)])
def test_the_share_is_what_torch_counts_of_layers_that_differ(checkpointed, part):
    """A token has as many multiply-adds as a layer's matrices have elements; attention is small for few tokens."""
    wide, tokens = (16, 64, 128, 256), torch.arange(2).view(1, 2)
    again, plain, headless = (
        counted(LanguageModel(numbers, wide=wide, part=part, vocabulary=size), tokens)
        for numbers, size in ((checkpointed, 4000), ((), 4000), ((), 8))
    )
    forward_of_layers = headless / 3 - 2 * 2 * 8 * 8  # without the head
    [share] = watch(LanguageModel(checkpointed, wide=wide, part=part), batch=tokens)[1]
    assert share == pytest.approx((again - plain) / forward_of_layers, abs=0.02)


def test_without_lists_of_layers_what_is_no_lookup_counts():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.first, self.head = nn.Embedding(500, 8), nn.Linear(8, 24), nn.Linear(24, 8)

        def forward(self, tokens):
            return self.head(checkpoint(self.first, self.embed(tokens), use_reentrant=False)).sum()

    assert watch(Plain(), batch=torch.zeros(1, 3, dtype=torch.long))[1] == (0.5,)


def test_the_members_of_a_sequence_that_are_alike_are_its_layers():
    class Again(nn.Sequential):
        def forward(self, tokens):
            x = self[0](tokens)
            for block in self[1:3]:
                x = checkpoint(block, x, use_reentrant=False)
            return self[3](x).sum()

    model = Again(nn.Embedding(500, 8), Block(8, 16), Block(8, 16), nn.Linear(8, 500))
    assert watch(model, batch=torch.zeros(1, 3, dtype=torch.long))[1] == (1.0,)


def test_only_the_first_step_is_watched():
    model = Net(4)
    probe, found = watch(model, micro_steps=2)
    assert found == (1.0,)
    assert probe.phase is ObserverPhase.DONE
    probe.forward_begin()
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_a_forward_within_the_first_step_after_another_is_no_recomputation():
    model = Net(0)
    probe = Probe.of(model)
    for _ in range(2):  # a loss of two forwards
        probe.forward_begin()
        loss = model(torch.ones(1, 4))
    loss.backward()
    assert probe.finish() == (0.0,)


def test_a_compiled_model_is_not_touched():
    model = nn.Sequential(Net(4))
    model[0]._compiled_call_impl = lambda: None
    assert Probe.of(model).modules == ()
    assert Probe.of(Net(4)).modules


def test_the_identity_watches_nothing():
    probe = Probe()
    probe.forward_begin()
    assert not probe.finish()
