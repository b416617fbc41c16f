"""Activation checkpointing under DeepSpeed's names: the same gradients, with less kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from zengine.deepspeed import NotAvailable, checkpointing


@pytest.fixture(autouse=True)
def clean():
    yield
    checkpointing.reset()


def gradient(run) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh())
    calls: list[int] = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    x = torch.ones(2, 4, requires_grad=True)
    run(block, x).sum().backward()
    return block[0].weight.grad, len(calls)


@pytest.mark.parametrize("run", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
@pytest.mark.parametrize("in_cpu", [False, True])
def test_blocks_are_computed_again_with_the_same_random_numbers(run, in_cpu):
    checkpointing.configure(checkpoint_in_cpu=in_cpu, num_checkpoints=2, synchronize=True)
    plain, once = gradient(lambda block, x: block(x))
    again, twice = gradient(run)
    assert torch.equal(plain, again)
    assert (once, twice) == (1, 2)


def test_settings_come_from_arguments_or_the_config_and_splitting_is_refused():
    assert not checkpointing.is_configured()
    checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": True}})
    assert checkpointing.is_configured()
    with pytest.raises(NotAvailable, match="splits activations over tensor-parallel ranks"):
        checkpointing.configure(partition_activations=True)
    with pytest.raises(NotAvailable, match="checkpoint_in_cpu=True frees"):
        checkpointing.configure(None, {"activation_checkpointing": {"partition_activations": True}})
