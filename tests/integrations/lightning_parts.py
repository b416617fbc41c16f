"""Shared parts of lightning_ranks.py: DeepSpeedStrategy on CPUs, a tiny model, and its data."""

from __future__ import annotations

from typing import Any

import lightning.fabric.accelerators
import lightning.fabric.strategies.deepspeed
import lightning.pytorch.accelerators
import lightning.pytorch.strategies.deepspeed
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

NUM_SAMPLES, MICRO_BATCH, LR = 48, 4, 1e-2


def allow_cpus() -> None:
    """Let DeepSpeedStrategy run on CPUs; it asks for a CUDA accelerator whose devices have the ranks' indices."""
    for library in (lightning.pytorch, lightning.fabric):
        module = library.strategies.deepspeed
        module.CUDAAccelerator = library.accelerators.CPUAccelerator
        module._validate_device_index_selection = lambda devices: None


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def loader(micro_batch: int = MICRO_BATCH) -> DataLoader[Any]:
    samples = torch.randn(NUM_SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(samples, batch_size=micro_batch)  # type: ignore[arg-type]  # a tensor is a sequence of samples


def loss_of(output: Tensor) -> Tensor:
    return (output.float() - 1).square().mean()


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=6)
