"""engine.activation_checkpointing by the config, with split layers and under ZeRO: equal results."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.build.activation_checkpointing import make_checkpointing
from zengine.config.plan.parallel import ActivationCheckpointing
from zpartition.activations import ArenaStore, DeviceStore, HostStore
from zpartition.layout.model_parallel import ALONE, ModelParallelGroup
from zpartition.tensor import parallelize
from zpartition.testing.tensor_models import PLAN, Language

CPU = torch.device("cpu")


def test_each_key_chooses_a_part() -> None:
    def made(**section: Any) -> Any:
        return make_checkpointing(ActivationCheckpointing(**section), ModelParallelGroup(None, 2, 1), CPU)

    plain = made()
    assert (plain.saved_inputs.mp_group, type(plain.saved_inputs.store)) == (ALONE, DeviceStore)
    assert made(partition_activations=True).saved_inputs.mp_group.size == 2
    assert isinstance(made(cpu_checkpointing=True).saved_inputs.store, HostStore)
    arena = made(contiguous_memory_optimization=True, number_checkpoints=3, cpu_checkpointing=True).saved_inputs.store
    assert isinstance(arena, ArenaStore)
    assert (arena.num_slots, arena.on_host) == (3, True)
    assert made(synchronize_checkpoint_boundary=True).synchronize is not plain.synchronize


def test_a_block_is_timed_forwards_and_again(caplog: pytest.LogCaptureFixture) -> None:
    section = ActivationCheckpointing(profile=True, synchronize_checkpoint_boundary=True)
    run, x = make_checkpointing(section, ALONE, CPU), torch.ones(2, requires_grad=True)
    with caplog.at_level(logging.INFO, "zengine"):
        run(torch.sin, x).sum().backward()
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "checkpointed forward",
        "recomputation",
    ]
    torch.testing.assert_close(x.grad, torch.ones(2).cos())


class Model(Language):
    """Blocks run as they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.float()
        self.run: Any = lambda block, x: block(x)

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = nn.functional.dropout(self.run(block, x), 0.1)
        return self.norm(x)


def trained(stage: int, section: dict[str, Any] | None) -> tuple[list[float], int]:
    """Losses and norms of three steps, and how many gathers of activations they took."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
        **({} if section is None else {"activation_checkpointing": section}),
    }
    told: list[float] = []
    log: list[Any] = []
    model = Model()
    parallelize(model, PLAN, torch.distributed.group.WORLD)
    engine = zengine.initialize(model=model, config=config)[0]
    with engine, zcomm.traced(log.append):
        if section is not None and "modules" not in section:
            engine.module.run = engine.activation_checkpointing
        torch.manual_seed(3)
        for _ in range(3):
            engine.backward(engine(torch.randint(0, 29, (2, 8))))
            report = engine.step()
            told += [report.loss, report.grad_norm]
    return told, sum(record.label == "activations" for record in log)


def _keeps_parts() -> list[int]:
    counts = []
    for stage in (0, 3):
        wanted, _ = trained(stage, None)
        for section in (
            {"partition_activations": True},
            {
                "partition_activations": True,
                "contiguous_memory_optimization": True,
                "number_checkpoints": 3,
                "cpu_checkpointing": True,
            },
            {"partition_activations": True, "modules": ["blocks.*"]},
        ):
            found, gathers = trained(stage, section)
            assert found == wanted
            counts.append(gathers)
    return counts


def test_split_models_keep_parts_of_activations_and_train_the_same_at_stages_0_and_3() -> None:
    assert run_ranks(_keeps_parts, 2) == [[9] * 6] * 2  # three blocks in three steps


def test_modules_that_are_not_there_are_told_and_those_that_are_become_plain_again() -> None:
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    model = Model()
    with pytest.raises(ValueError, match=r"pattern 'block.\*' of activation checkpoints matches none"):
        zengine.initialize(model=model, config={**config, "activation_checkpointing": {"modules": ["block.*"]}})
    plain = type(model.blocks[0])
    config["activation_checkpointing"] = {"modules": ["blocks.*"]}
    with zengine.initialize(model=model, config=config)[0] as engine:
        assert type(model.blocks[0]) is not plain
        assert engine.config["activation_checkpointing.modules"] == "blocks.*"
        engine.backward(engine(torch.randint(0, 29, (2, 8))))
        assert engine.step()
    assert type(model.blocks[0]) is plain
