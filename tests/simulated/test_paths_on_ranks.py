"""Paths of cuda that need two ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.layout.model_parallel import ModelParallelGroup
from zpartition.sequence import ring_attention
from zpartition.tensor.random_state import TPRandomState

DEVICE = torch.device("cuda", 0)


def meet() -> str:
    group = dist.new_group(backend="nccl")
    zcomm.barrier(group)
    return str(dist.get_backend(group))


def test_a_group_of_nccl_alone_has_a_barrier() -> None:
    assert run_ranks(meet, 2) == ["nccl", "nccl"]


def set_default_device() -> None:
    torch.set_default_device("cuda")


def read_default_device() -> torch.device:
    return torch.get_default_device()


def test_a_test_does_not_hand_its_default_device_to_the_next_one() -> None:
    run_ranks(set_default_device, 2)
    assert run_ranks(read_default_device, 2) == [torch.device("cpu")] * 2


def attend() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    size, rank = zcomm.group_size(), zcomm.group_rank()
    wholes = [torch.randn(1, 2, 16, 4, generator=generator) for _ in range(3)]
    mine = slice(rank * 16 // size, (rank + 1) * 16 // size)
    parts = [whole[:, :, mine].to(DEVICE).requires_grad_() for whole in wholes]
    out = ring_attention(*parts)
    out.square().sum().backward()
    whole_out = torch.nn.functional.scaled_dot_product_attention(*[whole.requires_grad_() for whole in wholes])
    whole_out.square().sum().backward()
    pairs = [(out, whole_out), *((part.grad, whole.grad) for part, whole in zip(parts, wholes))]
    return tuple((one.cpu() - other[:, :, mine]).abs().max() for one, other in pairs)


def test_sequence_ranks_attend_as_one_process() -> None:
    for worst in run_ranks(attend, 2):
        assert max(worst) < 1e-5


def drop() -> tuple[list[float], list[float]]:
    torch.manual_seed(5)
    state, x = TPRandomState(ModelParallelGroup.of(None)), torch.ones(64, device=DEVICE)
    state.diverge(x)
    inside = nn.functional.dropout(x, 0.5)
    state.restore()
    return inside.tolist(), nn.functional.dropout(x, 0.5).tolist()


def test_tensor_ranks_drop_their_own_values_inside_layers_and_the_same_between() -> None:
    first, second = run_ranks(drop, 2)
    assert first[0] != second[0]
    assert first[1] == second[1]


def train_with_lamb(stage: int) -> list[list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.Linear(33, 4))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        "fp16": {"enabled": True, "initial_scale_power": 8},
    }
    engine, *_ = zengine.initialize(model=model, config=config)
    values = torch.ones(4, 16, device=DEVICE, dtype=torch.float16)
    for _ in range(3):
        engine.parts.optimizer.optimizer.found_inf = torch.zeros((), device=DEVICE)  # as torch's scaler sets it
        engine.backward(engine(values).float().square().mean())
        engine.step()
    weights = [parameter.detach().float().flatten().tolist() for parameter in model.parameters()]
    engine.close()
    return weights


def test_lamb_updates_tensors_that_ranks_have_cut_as_whole_ones() -> None:
    whole, cut = run_ranks(train_with_lamb, 2, 0), run_ranks(train_with_lamb, 2, 2)
    assert cut[0] == cut[1]
    for one, other in zip(whole[0], cut[0]):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=2e-3, atol=1e-4)


def offload_weights() -> tuple[int, int, int]:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    engine, *_ = zengine.initialize(model=nn.Linear(512, 64), config=config)
    found = []
    for move in (lambda: None, engine.offload_states, engine.reload_states):
        move()
        found.append(torch.cuda.memory_allocated())
    engine.backward(engine(torch.ones(4, 512, device=DEVICE)).square().mean())
    report = engine.step()
    assert report is not None
    assert report.applied
    engine.close()
    return found[0], found[1], found[2]


def test_weights_of_stage_3_move_to_the_host_and_back() -> None:
    for before, offloaded, after in run_ranks(offload_weights, 2):
        assert offloaded <= before - 512 * 64 * 4 // 2
        assert after == before
