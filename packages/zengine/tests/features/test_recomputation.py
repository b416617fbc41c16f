"""Whether activations are computed again."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zengine.features.recomputation import Probe, Stage


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


def watch(model, micro_steps=1):
    """What a probe finds in a step."""
    probe = Probe.of(model)
    for _ in range(micro_steps):
        probe.forward_begin()
        loss = model(torch.ones(1, 4, requires_grad=True))
        probe.backward_begin()
        loss.backward()
    return probe, probe.finish()


@pytest.mark.parametrize(("checkpointed", "found"), [(0, False), (1, False), (2, True), (4, True)])
@pytest.mark.parametrize("reentrant", [False, True])
def test_half_of_the_parameters_decide(checkpointed, found, reentrant):
    model = Net(checkpointed, reentrant)
    probe, is_found = watch(model)
    assert is_found is found
    assert not probe.finish()  # once
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_only_the_first_micro_step_is_watched():
    model = Net(4)
    probe, found = watch(model, micro_steps=2)
    assert found
    assert probe.stage is Stage.OVER
    probe.forward_begin()
    assert not any(layer._forward_pre_hooks for layer in model.layers)


def test_a_forward_within_the_first_step_after_another_is_no_recomputation():
    model = Net(0)
    probe = Probe.of(model)
    for _ in range(2):  # a loss of two forwards
        probe.forward_begin()
        loss = model(torch.ones(1, 4))
    probe.backward_begin()
    loss.backward()
    assert not probe.finish()


def test_a_compiled_model_is_not_touched():
    model = nn.Sequential(Net(4))
    model[0]._compiled_call_impl = lambda: None
    assert Probe.of(model).modules == ()
    assert Probe.of(Net(4)).modules


def test_the_identity_watches_nothing():
    probe = Probe()
    probe.forward_begin()
    probe.backward_begin()
    assert not probe.finish()
