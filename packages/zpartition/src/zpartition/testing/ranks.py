"""Shared pieces of partition tests: a small model, training steps, and bitwise comparison of two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zcomm
from zpartition.layout.policy import Offload, ZeroPolicy
from zpartition.partition import Partition
from zpartition.sharding import shard
from zpartition.tensors.access import safe_get_full_fp32_param, safe_get_full_optimizer_state

__all__ = ["Net", "backward", "clip", "differing", "fingerprint", "losses_of", "make", "norm_of", "train"]


class Net(nn.Module):
    """Six layers, (n, 24) -> a scalar loss; `rest` is skipped unless requested."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(24, 48)
        self.middle = nn.Sequential(*(nn.Linear(48, 48) for _ in range(3)))
        self.rest = nn.Linear(48, 48)
        self.last = nn.Linear(48, 8)
        self.to(dtype)

    def forward(self, x: Tensor, with_rest: bool) -> Tensor:
        y = self.middle(torch.tanh(self.first(x)))
        loss: Tensor = self.last(self.rest(y) if with_rest else y).float().square().mean()
        return loss


def make(
    offload: Offload, stage: int, dtype: torch.dtype, **more: Any
) -> tuple[Net, torch.optim.Optimizer, Partition]:
    """Build a model, its optimizer, and a partition in several small buckets; `more` are fields of the policy."""
    model = Net(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    policy = ZeroPolicy(
        stage=stage, bucket_numel=3000, unit_numel=3000, persist_numel=100, max_live_numel=0, offload=offload, **more
    )
    return model, optimizer, shard(model, optimizer, policy=policy)


def backward(partition: Partition, model: nn.Module, step: int, accumulation: int) -> None:
    """Run the micro-steps of one step on data that depend on step and rank; odd steps skip `rest`."""
    generator = torch.Generator().manual_seed(100 * step + zcomm.group_rank(partition.group))
    dtype = next(model.parameters()).dtype
    for micro in range(accumulation):
        x = torch.randn(4, 24, generator=generator).to(dtype)
        with partition.micro_step(is_last=micro == accumulation - 1):
            model(x, step % 2 == 0).backward()


def train(partition: Partition, model: nn.Module, optimizer: Any, steps: range, accumulation: int) -> None:
    """Run whole steps."""
    for step in steps:
        backward(partition, model, step, accumulation)
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=step % 2 == 1)
        partition.zero_grad()


def losses_of(partition: Partition, forward: Callable[[], Tensor], num_steps: int) -> list[float]:
    """Return the losses of `num_steps` steps of one micro-step each, computed by `forward`."""
    losses, optimizer = [], partition.optimizer
    assert optimizer is not None
    for _ in range(num_steps):
        with partition.micro_step():
            loss = forward()
            torch.autograd.backward(loss)
        losses.append(loss.item())
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return losses


def norm_of(partition: Partition) -> Tensor:
    """Finish the gradients of a step and return their norm over all ranks, () float64.  Collective."""
    counted = partition.finish_gradients()
    squares = torch.stack([torch.zeros((), dtype=torch.float64), *(part.double().square().sum() for part in counted)])
    total = squares.sum().view(1)
    partition.sum_over_shards(total)
    return total.sqrt().view(())


def clip(partition: Partition, limit: float) -> float:
    """Finish the gradients and clip their norm to `limit`, as torch does; returns the norm.  Collective."""
    norm = float(norm_of(partition))
    for storage in partition.storages:
        assert storage.master.grad is not None
        storage.master.grad.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def fingerprint(partition: Partition, model: nn.Module) -> dict[str, Tensor]:
    """Return weights, masters and states, whole, by name."""
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        found[f"master.{name}"] = safe_get_full_fp32_param(param)
        for key in ("exp_avg", "exp_avg_sq"):
            found[f"{key}.{name}"] = safe_get_full_optimizer_state(param, key)
    return found


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """Return the names of values that differ or are missing in one of the two."""
    return [name for name in a if not torch.equal(a[name], b[name])] + sorted(set(a) ^ set(b))
