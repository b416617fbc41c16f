"""Expert parallelism through zengine: losses and norms equal those of one process, at every stage and accumulation.

Checkpoints load at other numbers of expert ranks bit for bit, and training continues from them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.features.measuring import norms_by_layer
from zpartition.layout.model_parallel import expert_shards_of
from zpartition.testing.expert_models import CLIP, STEPS, MoELanguageModel, batches, train_alone

BOUND = 3e-5  # of a loss or norm near 3, in float32, against float64
STAGES = (0, 1, 2, 3)


def engine_of(stage: int, expert: int, accumulation: int, reduce_at: str = "") -> zengine.Engine:
    """Make a float32 engine; the config shards the experts."""
    moment = {"reduce_at": reduce_at} if reduce_at else {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 700,
            "stage3_unit_size": 700,
            "stage3_param_persistence_threshold": 20,
            **moment,
        },
        "expert_parallel": {"enabled": expert > 1, "autoep_size": expert},
    }
    engine = zengine.initialize(model=MoELanguageModel().float(), config=config)[0]
    assert are_sharded(engine) == (expert > 1)
    return engine


def are_sharded(engine: zengine.Engine) -> bool:
    return bool(expert_shards_of(engine.module))


def train(engine: zengine.Engine, accumulation: int) -> tuple[list[float], list[float]]:
    """Return losses, as means over all ranks, and norms."""
    replicas, replica = zcomm.group_size(), zcomm.group_rank()
    losses, norms = [], []
    for step in batches(replicas, accumulation):
        for micro in step:
            engine.backward(engine(micro[replica]))
            report = engine.step()
        assert report is not None
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms


def _curves(expert: int, accumulations: tuple[int, ...], stages: tuple[int, ...]) -> dict[Any, Any]:
    found = {}
    for stage in stages:
        for accumulation in accumulations:
            engine = engine_of(stage, expert, accumulation)
            found[stage, accumulation] = train(engine, accumulation)
            engine.close()
    return found


@pytest.mark.parametrize(
    ("world_size", "expert", "accumulations", "stages"), [(2, 2, (1, 3), STAGES), (4, 2, (3,), STAGES)]
)
def test_curves_are_those_of_one_process_with_all_experts(
    world_size: int, expert: int, accumulations: tuple[int, ...], stages: tuple[int, ...]
) -> None:
    expected = {accumulation: train_alone(world_size, accumulation) for accumulation in accumulations}
    for rank in run_ranks(_curves, world_size, expert, accumulations, stages):
        for (stage, accumulation), (losses, norms) in rank.items():
            assert losses == pytest.approx(expected[accumulation][0], abs=BOUND), f"stage {stage} x {accumulation}"
            assert norms == pytest.approx(expected[accumulation][1], abs=BOUND), f"stage {stage} x {accumulation}"


def _each_moment() -> list[tuple[tuple[list[float], list[float]], int]]:
    """Return curves at stage 0, and the gradient messages of the last step, by moment of the reduction."""
    found = []
    for moment in ("boundary", "micro_step"):
        engine, records = engine_of(0, 2, 3, moment), list[zcomm.Record]()
        with zcomm.traced(records):
            curves = train(engine, 3)
        engine.close()
        found.append((curves, sum(record.label.startswith("gradients[") for record in records)))
    return found


def test_gradients_of_experts_too_are_reduced_once_a_step_or_after_each_backward() -> None:
    expected = train_alone(2, 3)
    for (once, num_once), (often, num_often) in run_ranks(_each_moment, 2):
        assert num_often == 3 * num_once
        for losses, norms in (once, often):
            assert losses == pytest.approx(expected[0], abs=BOUND)
            assert norms == pytest.approx(expected[1], abs=BOUND)


def _around(root: Path) -> tuple[list[list[float]], list[str], int]:
    """Resume a checkpoint of 2 expert ranks at 2, at 1, then at 4; return losses and differences."""
    first = engine_of(2, 2, 1)
    train(first, 1)
    first.save_checkpoint(str(root), "2")
    curves = [train(first, 1)[0]]
    first.close()
    before = "2"
    for expert, stage in ((1, 3), (4, 1), (2, 0)):
        engine = engine_of(stage, expert, 1)
        engine.load_checkpoint(str(root), before)
        before = f"{before}-{expert}"
        engine.save_checkpoint(str(root), before)
        curves.append(train(engine, 1)[0])
        engine.close()
    saved = [zckpt.find(str(root), tag) for tag in ("2", "2-1", "2-1-4", "2-1-4-2")]
    names = saved[0].names()
    wrong = [
        f"{other.tag}: {name}"
        for other in saved[1:]
        for name in {*names, *other.names()}
        if not torch.equal(saved[0].tensor(name), other.tensor(name))
    ]
    return curves, wrong, saved[0].tensor("model.blocks.0.moe.experts.stacked.up.weight").shape[0]


def _beside(root: Path) -> list[Any]:
    """Return whole weights, norms by layer, and losses in bf16 with states on the host."""
    found: list[Any] = []
    for stage, expert in ((0, 1), (0, 2), (2, 2), (3, 2)):
        engine = engine_of(stage, expert, 1)
        train(engine, 1)
        engine.save_16bit_model(str(root), f"{stage}-{expert}.safetensors")
        zcomm.barrier()
        saved = load_file(root / f"{stage}-{expert}.safetensors")
        state = engine.state_dict()
        assert all(torch.equal(saved[name], state[name]) for name in saved)
        engine.load_state_dict({name: 2 * value for name, value in state.items()})
        engine.backward(engine(batches(2, 1)[0, 0, zcomm.group_rank()]))
        engine.parts.partition.finish_gradients()
        by_layer = norms_by_layer(engine.parts.partition)
        assert sum(norm**2 for norm in by_layer.values()) ** 0.5 == pytest.approx(engine.step().grad_norm, rel=1e-5)
        found.append(({name: value.double() for name, value in engine.state_dict().items()}, by_layer))
        engine.close()
    return found


def test_whole_weights_and_norms_by_layer_are_those_of_all_experts(tmp_path: Path) -> None:
    for whole, *others in run_ranks(_beside, 2, tmp_path):
        for weights, norms in others:
            assert norms == pytest.approx(whole[1], rel=1e-3)
            for name, value in weights.items():
                torch.testing.assert_close(value, whole[0][name], atol=2e-3, rtol=0, msg=name)


def _narrow() -> list[list[float]]:
    """Train in bf16 at stages 1 and 3, one with states on the host; return the losses."""
    found = []
    for stage, offload in ((1, {}), (3, {}), (2, {"offload_optimizer": {"device": "cpu"}})):
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02}},
            "zero_optimization": {"stage": stage, **offload, "stage3_param_persistence_threshold": 20},
            "expert_parallel": {"enabled": True, "autoep_size": 2},
        }
        engine = zengine.initialize(model=MoELanguageModel().float(), config=config)[0]
        assert are_sharded(engine)
        losses = []
        for _ in range(8):
            engine.backward(engine(batches(2, 1)[0, 0, zcomm.group_rank()]))
            losses.append(engine.step().loss)
        found.append(losses)
        engine.close()
    return found


def test_in_bf16_experts_learn_the_same_at_every_stage() -> None:
    first, second = run_ranks(_narrow, 2)
    assert first == second
    assert all(losses[-1] < losses[0] - 0.3 for losses in first)
    for other in first[1:]:
        assert other == pytest.approx(first[0], abs=0.02)


def test_checkpoints_go_between_numbers_of_expert_ranks(tmp_path: Path) -> None:
    for curves, wrong, num_experts in run_ranks(_around, 4, tmp_path):
        assert not wrong
        assert num_experts == 4
        assert len(curves[0]) == STEPS
        for other in curves[1:]:
            assert other == pytest.approx(curves[0], abs=BOUND)
