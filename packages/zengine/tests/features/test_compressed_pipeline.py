"""Compressed optimizers in a pipeline: the ranks of each stage average their momenta."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import recorded, run_ranks
from zpartition.pipeline import PipelineModule, TiedLayerSpec

FREEZE = 3
MICRO = 2
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"lr": 0.01, "freeze_step": FREEZE, "betas": [0.9, 0.99]},
    "OneBitLamb": {"lr": 0.02, "freeze_step": FREEZE, "betas": [0.9, 0.99]},
    "ZeroOneAdam": {
        "lr": 0.01,
        "var_freeze_step": 5,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 4,
    },
}


def model(stages: int, *, is_tied: bool = False) -> PipelineModule:
    torch.manual_seed(3)
    middle: list[Any] = [nn.Linear(9, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 5)]
    if is_tied:
        middle = [
            TiedLayerSpec("t", nn.Linear, 9, 9),
            nn.Tanh(),
            nn.Linear(9, 9),
            TiedLayerSpec("t", nn.Linear, 9, 9),
        ]
    return PipelineModule(middle, num_stages=stages, loss_fn=lambda out, y: (out[:, :5] - y).square().mean())


def engine_of(kind: str, stages: int, stage: int = 0, *, is_tied: bool = False, **params: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": kind, "params": {**OPTIMIZERS[kind], **params}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1.0,
    }
    return zengine.initialize(model=model(stages, is_tied=is_tied), config=config)[0]


def batches(step: int, replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + replica)
    for _ in range(MICRO):
        yield torch.randn(4, 9, generator=generator), torch.randn(4, 5, generator=generator)


def train(engine: Any, steps: range) -> list[float]:
    replica = engine.parts.partition.rank
    return [float(engine.train_batch(batches(step, replica))) for step in steps]


def weights(engine: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in engine.module.named_parameters()}


def _runs(kind: str, stages: int, steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    engine = engine_of(kind, stages)
    found = train(engine, range(steps)), weights(engine)
    engine.close()
    return found


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_stages_without_replicas_train_as_one_process(kind: str) -> None:
    (alone,) = run_ranks(_runs, 1, kind, 1, 10)
    staged = run_ranks(_runs, 2, kind, 2, 10)
    assert staged[0][0] == pytest.approx(alone[0], rel=1e-5)
    for name, weight in (staged[0][1] | staged[1][1]).items():
        assert torch.allclose(weight, alone[1][name], rtol=0, atol=1e-5)


def _trains(
    kind: str, stage: int, *, is_tied: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], list[int]]:
    engine = engine_of(kind, 2, stage, is_tied=is_tied)
    losses, sent = [], []
    for _ in range(9):
        with recorded() as log:
            losses += train(engine, range(1))  # the same batch
        sent.append(log.labels.count("compressed momenta"))
    while "weight.0" in engine.optimizer.rank_tensors():  # 0/1 Adam between two synchronizations
        train(engine, range(1))
    found = losses, weights(engine), sent
    engine.close()
    return found


@pytest.mark.parametrize(
    ("kind", "stage"), [(kind, 0) for kind in OPTIMIZERS] + [("OneBitAdam", 1), ("OneBitLamb", 1)]
)
def test_ranks_of_a_stage_send_their_momenta_in_one_message_a_phase_and_agree(kind: str, stage: int) -> None:
    everyone = run_ranks(_trains, 4, kind, stage)
    losses = [found for found, _, _ in everyone]
    assert losses == [losses[0]] * 4
    assert losses[0][-1] < losses[0][0]
    # ranks 0 and 1, and 2 and 3, hold one stage each
    for first, second in ((0, 1), (2, 3)):
        for name, weight in everyone[first][1].items():
            assert torch.equal(weight, everyone[second][1][name]), name
    if kind != "ZeroOneAdam":
        assert all(sent == [0] * FREEZE + [2] * (9 - FREEZE) for _, _, sent in everyone)


def test_tied_weights_are_updated_by_their_owner() -> None:
    for losses, found, _ in run_ranks(_trains, 4, "OneBitAdam", 0, is_tied=True):
        assert losses[-1] < losses[0]
        assert all(weight.isfinite().all() for weight in found.values())


def _freezes(stages: int) -> list[bool]:
    engine = engine_of("OneBitAdam", stages, freeze_step="auto", betas=[0.9, 0.9])
    found = []
    for step in range(60):
        train(engine, range(step, step + 1))
        found.append(engine.optimizer.param_groups[0]["frozen"])
    engine.close()
    return found


def test_all_stages_freeze_when_the_whole_model_has_settled() -> None:
    (alone,) = run_ranks(_freezes, 1, 1)
    assert any(alone)
    assert not all(alone)
    assert run_ranks(_freezes, 2, 2) == [alone, alone]


# -- checkpoints -----------------------------------------------------------------------------------------


def _resumed(kind: str, stage: int, folder: str, cut: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    steps = cut + 6
    straight = engine_of(kind, 2, stage)
    train(straight, range(cut))
    straight.save_checkpoint(folder)
    train(straight, range(cut, steps))
    other = engine_of(kind, 2, stage)
    train(other, range(20, 22))
    other.load_checkpoint(folder)
    train(other, range(cut, steps))
    found = weights(straight), weights(other)
    straight.close()
    other.close()
    return found


@pytest.mark.parametrize(
    ("kind", "stage", "cut"),
    [("OneBitAdam", 0, 5), ("OneBitAdam", 1, 5), ("OneBitLamb", 0, 5), ("OneBitLamb", 1, 5), ("ZeroOneAdam", 0, 9)],
)
def test_a_resumed_run_continues_bit_for_bit(kind: str, stage: int, cut: int, tmp_path: Any) -> None:
    for straight, other in run_ranks(_resumed, 4, kind, stage, str(tmp_path), cut):
        for name, weight in straight.items():
            assert torch.equal(weight, other[name]), name


def _saves(folder: str) -> None:
    engine = engine_of("OneBitAdam", 2)
    train(engine, range(FREEZE + 2))
    engine.save_checkpoint(folder)
    engine.close()


def _loads(folder: str, stages: int) -> tuple[float, list[str]]:
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    engine = engine_of("OneBitAdam", stages)
    logging.getLogger("zengine").addHandler(handler)
    engine.load_checkpoint(folder)
    logging.getLogger("zengine").removeHandler(handler)
    errors = sum(float(tensor.abs().sum()) for tensor in engine.optimizer.rank_tensors().values())
    train(engine, range(1))
    engine.close()
    return errors, [note for note in notes if "compression errors" in note]


def test_another_number_of_stages_starts_with_errors_of_0_and_says_so(tmp_path: Any) -> None:
    run_ranks(_saves, 4, str(tmp_path))
    same = run_ranks(_loads, 4, str(tmp_path), 2)
    assert all(errors > 0 and not notes for errors, notes in same)
    other = run_ranks(_loads, 2, str(tmp_path), 1)
    assert all(errors == 0.0 for errors, _ in other)
    assert [len(notes) for _, notes in other] == [1, 0]
