"""Activation checkpointing under DeepSpeed's names: the same gradients, with less kept."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine import ConfigError
from zengine.deepspeed import checkpointing


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(checkpointing, "_current", type(checkpointing._current)())


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


@pytest.mark.parametrize("run", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
def test_keyword_arguments_reach_the_block_with_their_gradients(run):
    def gradients(call) -> list[torch.Tensor]:
        leaves = [torch.linspace(-1, 1, 4).add(offset).requires_grad_() for offset in (0.0, 0.5)]
        bias = leaves[1].cos()
        out = call(lambda x, *, bias, factor: torch.tanh(x * factor + bias), leaves[0].sin(), bias=bias, factor=2.0)
        (out * bias).sum().backward()
        return [leaf.grad for leaf in leaves]

    wanted = gradients(lambda function, *args, **kwargs: function(*args, **kwargs))
    assert all(torch.equal(a, b) for a, b in zip(gradients(run), wanted))


def test_settings_come_from_arguments_or_the_config(tmp_path):
    assert not checkpointing.is_configured()
    path = tmp_path / "ds.json"
    path.write_text('{"train_batch_size": "auto", "activation_checkpointing": {"cpu_checkpointing": true}}')
    checkpointing.configure(None, str(path), profile=True)
    assert checkpointing.is_configured()
    assert checkpointing.settings().cpu_checkpointing
    assert checkpointing.settings().profile
    checkpointing.configure(None, {"activation_checkpointing": {"cpu_checkpointing": True}}, checkpoint_in_cpu=False)
    assert not checkpointing.settings().cpu_checkpointing


def test_settings_that_do_not_go_together_are_refused_by_name():
    with pytest.raises(ConfigError, match="partition_activations and number_checkpoints are not"):
        checkpointing.configure(contiguous_checkpointing=True)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.profil.*profile"):
        checkpointing.configure(deepspeed_config={"activation_checkpointing": {"profil": True}})
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    checkpointing.set_num_layers(5)
    assert checkpointing.settings().number_checkpoints == 5
    with pytest.raises(ConfigError, match="number_checkpoints is not set"):
        checkpointing.set_num_layers(0)


def test_the_config_of_an_engine_counts_until_configure_is_called():
    config = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True}}
    deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    assert checkpointing.settings().cpu_checkpointing
    assert not checkpointing.is_configured()
    checkpointing.configure(synchronize=True)
    deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    assert not checkpointing.settings().cpu_checkpointing


def test_a_reset_frees_memory_and_keeps_the_settings():
    checkpointing.configure(partition_activations=True, contiguous_checkpointing=True, num_checkpoints=2)
    plain, _ = gradient(lambda block, x: block(x))
    arenas = []
    for _ in range(2):
        assert torch.equal(gradient(checkpointing.checkpoint)[0], plain)
        (made,) = checkpointing._current.instances.values()
        arenas.append(made.saved_inputs.store)
        checkpointing.reset()
    assert arenas[0] is not arenas[1]
    assert arenas[0].free
    assert checkpointing.is_configured()
    assert checkpointing.settings().number_checkpoints == 2


def test_blocks_are_timed(caplog):
    checkpointing.configure(profile=True)
    with caplog.at_level(logging.INFO, "zengine"):
        gradient(checkpointing.checkpoint)
    told = [record.getMessage().partition(":")[0] for record in caplog.records if " ms" in record.getMessage()]
    assert told == ["checkpointed forward", "recomputation"]


class Megatron:
    """Two tensor ranks, as an mpu tells of them."""

    def get_model_parallel_group(self) -> object:
        return torch.distributed.group.WORLD

    def get_model_parallel_rank(self) -> int:
        return torch.distributed.get_rank()


def _over_tensor_ranks() -> list[object]:
    checkpointing.configure(Megatron(), partition_activations=True, contiguous_checkpointing=True, num_checkpoints=4)
    checkpointing.model_parallel_cuda_manual_seed(5)
    tracker, drawn, log = checkpointing.get_cuda_rng_tracker(), [], []

    def block(x: torch.Tensor) -> torch.Tensor:
        with tracker.fork():
            drawn.append(torch.rand(1).item())
        return torch.sin(nn.functional.dropout(x, 0.5))

    gradients = []
    for run in (lambda function, x: function(x), checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        torch.manual_seed(1)
        x = torch.linspace(0, 1, 9, requires_grad=True)
        with zcomm.traced(log.append):
            run(block, x * 2).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    checkpointing.model_parallel_reconfigure_tp_seed(5)
    with tracker.fork():
        again = torch.rand(1).item()
    checkpointing._current = type(checkpointing._current)()
    return [*drawn, again, sum(record.label == "activations" for record in log)]


def test_tensor_ranks_keep_parts_and_draw_numbers_of_their_own():
    first, second = run_ranks(_over_tensor_ranks, 2)
    assert first[1] == first[2]  # forward, and again
    assert first[3] == first[4]
    assert len({first[0], first[1], first[3], second[0], second[1], second[3]}) == 6
    assert first[5] == first[0]
    assert first[6] == second[6] == 2  # of the two that were checkpointed
