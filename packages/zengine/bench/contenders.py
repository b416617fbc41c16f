"""Who trains in the training bench: ours at every stage, and the peers, each as a step in three phases."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import models
import torch
from torch import Tensor, nn

__all__ = ["CONTENDERS", "Contender", "available"]

LR = 1e-4
Phases = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Any], Callable[[], Any], Callable[[], Any]]
Contender = Callable[[models.Shape, bool], Phases]  # shape, bf16 -> forward, backward, step, close


def _engine(stage: int, **zero: int) -> Contender:
    def make(shape: models.Shape, bf16: bool) -> Phases:
        import zengine

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage, **zero},
        }
        engine, *_ = zengine.initialize(model=models.make(shape), config=config)
        return engine, engine.backward, engine.step, engine.close

    return make


def _plain(shape: models.Shape, bf16: bool) -> Phases:
    """Forward and backward alone, nothing exchanged, nothing updated: part of the floor."""
    model = _model(shape, bf16)

    def forget() -> None:
        for param in model.parameters():
            param.grad = None

    return model, Tensor.backward, forget, lambda: None


def _ddp(shape: models.Shape, bf16: bool) -> Phases:
    model = nn.parallel.DistributedDataParallel(_model(shape, bf16), gradient_as_bucket_view=True)
    return model, Tensor.backward, _clipped(model, _adamw(model)), lambda: None


def _fsdp2(shape: models.Shape, bf16: bool) -> Phases:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = _model(shape, bf16)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, Tensor.backward, _clipped(model, _adamw(model)), lambda: None


def _deepspeed(stage: int) -> Contender:
    def make(shape: models.Shape, bf16: bool) -> Phases:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": bf16},
            "optimizer": {"type": "AdamW", "params": {"lr": LR}},
            "zero_optimization": {"stage": stage},
        }
        engine, *_ = deepspeed.initialize(model=models.make(shape), config=config, dist_init_required=False)
        return engine, engine.backward, engine.step, engine.destroy

    return make


def _model(shape: models.Shape, bf16: bool) -> nn.Module:
    return models.make(shape).to(torch.bfloat16 if bf16 else torch.float32)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, fused=True)


def _clipped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Contender] = {
    "forward + backward alone": _plain,
    "ours stage 0": _engine(0),
    "ours stage 1": _engine(1),
    "ours stage 2": _engine(2),
    "ours stage 3": _engine(3),
    "ours stage 3 strict": _engine(3, stage3_param_persistence_threshold=0, stage3_max_live_parameters=0),
    "DDP + torch AdamW": _ddp,
    "FSDP2 + torch AdamW": _fsdp2,
    "DeepSpeed stage 2": _deepspeed(2),
    "DeepSpeed stage 3": _deepspeed(3),
}


def available() -> list[str]:
    """The contenders that can run here."""
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [name for name in CONTENDERS if has_deepspeed or not name.startswith("DeepSpeed")]
