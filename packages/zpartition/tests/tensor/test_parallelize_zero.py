"""ZeRO over tensor-parallel models: stages x accumulation x data-parallel ranks, against one process."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.tensor import TensorPlan, parallelize, whole_state_dict
from zpartition.testing import clip
from zpartition.testing.tensor_models import PLAN, SEQUENCE, Language

STEPS, CLIP = 3, 0.5


def batches(replicas: int, accumulation: int) -> Tensor:
    """Tokens of (step, micro-step, replica)."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 29, (STEPS, accumulation, replicas, 2, 8), generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def train_alone(replicas: int, accumulation: int) -> tuple[list[float], list[float], float]:
    """Return losses, norms and a fingerprint of the weights of plain PyTorch on all data."""
    model = Language()
    optimizer = make_optimizer(model)
    losses, norms = [], []
    for step in batches(replicas, accumulation):
        total = 0.0
        for tokens in step.flatten(0, 1):
            loss = model(tokens) / (replicas * accumulation)
            loss.backward()
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, fingerprint(model.state_dict())


def fingerprint(state: dict[str, Tensor]) -> float:
    """Sum all elements of all tensors, each with a different weight."""
    flat = torch.cat([value.reshape(-1) for value in state.values()])
    return float(flat @ torch.linspace(0.5, 1.5, flat.numel(), dtype=flat.dtype))


def train(
    plan: TensorPlan, stage: int, accumulation: int, tensor: object, data: object
) -> tuple[list[float], list[float], float]:
    """Return the same, split over two tensor ranks and the data ranks."""
    model = Language()
    optimizer = make_optimizer(model)  # before the split: parameters keep their identity
    parallelize(model, plan, tensor)
    policy = ZeroPolicy(stage=stage, bucket_numel=2000, unit_numel=2000, persist_numel=20, max_live_numel=0)
    partition = zpartition.shard(model, optimizer, policy=policy, group=data)
    replicas, replica = zcomm.group_size(data), zcomm.group_rank(data)
    losses, norms = [], []
    for step in batches(replicas, accumulation):
        total = torch.zeros((), dtype=torch.float64)
        for index, micro in enumerate(step):
            with partition.micro_step(is_last=index == accumulation - 1):
                loss = model(micro[replica]) / accumulation
                loss.backward()
            total += loss.detach() / replicas
        norms.append(clip(partition, CLIP))
        partition.apply(optimizer.step)
        partition.zero_grad()
        zcomm.all_reduce(total, data)
        losses.append(float(total))
    mark = fingerprint(whole_state_dict(model))  # gathers at stage 3
    partition.close()
    return losses, norms, mark


def curves(plan: TensorPlan, accumulation: int) -> list[tuple[list[float], list[float], float]]:
    tensor, data = zcomm.consecutive_group(2), zcomm.strided_group(2)
    return [train(plan, stage, accumulation, tensor, data) for stage in (0, 1, 2, 3)]


@pytest.mark.parametrize(("world_size", "accumulation"), [(2, 2), (4, 1), (4, 2)])
def test_losses_and_norms_equal_one_process(world_size: int, accumulation: int) -> None:
    plan = SEQUENCE if (world_size, accumulation) == (4, 1) else PLAN
    losses, norms, mark = train_alone(world_size // 2, accumulation)
    for rank in run_ranks(curves, world_size, plan, accumulation):
        for stage, (ours, our_norms, our_mark) in enumerate(rank):
            assert ours == pytest.approx(losses, abs=1e-11), f"stage {stage}"
            assert our_mark == pytest.approx(mark, abs=1e-9), f"stage {stage}"
            assert our_norms == pytest.approx(norms, abs=1e-11), f"stage {stage}"
    assert min(norms) > CLIP  # clipping is exercised
