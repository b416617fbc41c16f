"""Compressed optimizers that a config makes have DeepSpeed's classes and the names that its tests read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.runtime.fp16.onebit import OnebitAdam, OnebitLamb, ZeroOneAdam

KINDS: dict[str, tuple[type[Any], str, dict[str, Any]]] = {
    "OneBitAdam": (OnebitAdam, "adam_freeze_key", {"freeze_step": 2}),
    "OneBitLamb": (OnebitLamb, "lamb_freeze_key", {"freeze_step": 2}),
    "ZeroOneAdam": (ZeroOneAdam, "freeze_key", {"var_freeze_step": 1}),
}


def engine_of(kind: str, **params: Any) -> Any:
    torch.manual_seed(0)
    optimizer = {"type": kind, "params": {"lr": 1e-3, **KINDS[kind][2], **params}}
    config = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "bf16": {"enabled": True}}
    return deepspeed.initialize(model=nn.Linear(9, 3), config=config)[0]


def train(engine: Any, num_steps: int) -> None:
    for step in range(num_steps):
        generator = torch.Generator().manual_seed(10 * step + zcomm.group_rank())
        x = torch.randn(2, 9, generator=generator, dtype=torch.float32).bfloat16()
        engine.backward(engine(x).float().square().mean())
        engine.step()


@pytest.mark.parametrize("kind", KINDS)
def test_the_optimizer_has_the_class_and_the_key_of_its_phase(kind: str) -> None:
    made, key, _ = KINDS[kind]
    engine = engine_of(kind)
    assert isinstance(engine.optimizer, made)
    assert getattr(engine.optimizer.optimizer, key) is False
    train(engine, 4)
    assert getattr(engine.optimizer.optimizer, key) is True
    engine.close()


def _longer_warm_up(kind: str, folder: str) -> list[bool]:
    first = engine_of(kind)
    train(first, 4)
    first.save_checkpoint(folder)
    found = [first.optimizer.needs_local_gradients]
    first.close()
    for freeze_step in (3, 20):
        other = engine_of(kind, freeze_step=freeze_step)
        other.load_checkpoint(folder)
        train(other, 1)
        found += [getattr(other.optimizer, KINDS[kind][1]), other.optimizer.needs_local_gradients]
        train(other, 2)
        assert all(param.isfinite().all() for param in other.module.parameters())
        other.close()
    return found


@pytest.mark.parametrize("kind", ["OneBitAdam", "OneBitLamb"])
def test_a_larger_freeze_step_continues_the_warm_up_of_a_loaded_state(kind: str, tmp_path: Any) -> None:
    assert run_ranks(_longer_warm_up, 2, kind, str(tmp_path)) == [[True, True, True, False, False]] * 2
