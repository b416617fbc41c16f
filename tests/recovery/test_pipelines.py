"""Checkpoints of a pipeline resume at other numbers of stages, replicas and ZeRO stages, and as a plain module."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.pipeline_engine import PipelineEngine

CONTRACT = str(Path(__file__).parents[1] / "contract")  # the model of these tests
if CONTRACT not in sys.path:
    sys.path.insert(0, CONTRACT)

COUNT = 4  # micro-batches of a step, over all replicas
HOPS = ((2, 2), (1, 3), (4, 1), (2, 3))  # (pipeline stages, ZeRO stage), in this order


def engine_of(num_stages: int, stage: int, seed: int) -> zengine.Engine:
    from pipeline_model import Plain, config, pipelined

    if num_stages > 1:
        return pipelined(num_stages, stage, COUNT, seed=seed)
    torch.manual_seed(seed)
    return zengine.initialize(model=Plain(), config=config(stage, COUNT // zcomm.group_size()))[0]


def steps(engine: zengine.Engine, first: int) -> list[tuple[float, float]]:
    """Return loss and gradient norm of two steps."""
    from pipeline_model import loss_of, mine

    found = []
    for step in (first, first + 1):
        if isinstance(engine, PipelineEngine):
            engine.train_batch(iter(mine(step, COUNT, engine)))
        else:
            for inputs, labels in mine(step, COUNT, engine):
                engine.backward(loss_of(engine(inputs), labels))
                engine.step()
        assert engine.last_report is not None
        found.append((engine.last_report.loss, engine.last_report.grad_norm))
    return found


def chain(root: Path) -> list[tuple[float, float]]:
    """Train two steps per hop, from the checkpoint of the hop before."""
    found: list[tuple[float, float]] = []
    for number, (num_stages, stage) in enumerate(HOPS):
        with engine_of(num_stages, stage, seed=number) as engine:
            if number:
                engine.load_checkpoint(str(root))
            found += steps(engine, 2 * number)
            assert engine.global_steps == 2 * number + 2
            engine.save_checkpoint(str(root))
    return found


def test_any_split_resumes_any_other(tmp_path: Path) -> None:
    everywhere = run_ranks(chain, 4, tmp_path)
    assert all(found == everywhere[0] for found in everywhere)
    for ours, expected in zip(everywhere[0], run_ranks(uninterrupted, 1)[0], strict=True):
        assert ours == pytest.approx(expected, rel=1e-5)


def uninterrupted() -> list[tuple[float, float]]:
    with engine_of(1, 0, seed=0) as engine:
        return [each for hop in range(len(HOPS)) for each in steps(engine, 2 * hop)]


def saves(root: Path) -> list[str]:
    with engine_of(2, 1, seed=0) as engine:
        steps(engine, 0)
        engine.save_checkpoint(str(root), "one")
        return sorted(name for name, _ in engine.module.named_parameters())


def test_shared_weights_are_saved_once_under_the_names_of_the_whole(tmp_path: Path) -> None:
    from pipeline_model import Plain

    import zckpt

    first, second = run_ranks(saves, 2, tmp_path)
    wanted = {f"model.{name}" for name in Plain().state_dict()}
    assert {name for name in zckpt.find(tmp_path).names() if name.startswith("model.")} == wanted
    assert not set(first) & set(second)


def exports(num_stages: int, stage: int, root: Path, filename: str, per_rank: int = 1) -> tuple[Any, Any, float]:
    """Return rank 0's state dict, the names of trained values, and the loss of an evaluation."""
    from pipeline_model import mine, pipelined

    with pipelined(num_stages, stage, COUNT, per_rank=per_rank) as engine:
        steps(engine, 0)
        loss = engine.eval_batch(iter(mine(99, COUNT, engine))).item()
        for name, param in engine.module.named_parameters():
            param.requires_grad_(not name.startswith("blocks.2"))
        assert engine.save_16bit_model(str(root), filename)
        trained = engine._consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        return engine._consolidated_16bit_state_dict(), None if trained is None else set(trained), loss


@pytest.mark.parametrize(
    ("world", "num_stages", "stage", "filename", "per_rank"),
    [
        (4, 2, 3, "pytorch_model.bin", 1),
        (4, 4, 1, "model.safetensors", 1),
        (2, 2, 0, "pytorch_model.bin", 2),
    ],
)
def test_one_file_has_the_layers_of_all_stages_under_the_names_of_the_plain_model(
    tmp_path: Path, world: int, num_stages: int, stage: int, filename: str, per_rank: int
) -> None:
    from pipeline_model import Plain, data, loss_of

    first, *others = run_ranks(exports, world, num_stages, stage, tmp_path, filename, per_rank)
    state, trained, loss = first
    assert all((each[0], each[1]) == (None, None) for each in others)
    read = load_file if filename.endswith("safetensors") else torch.load
    saved = read(tmp_path / filename)
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[name], value) for name, value in state.items())
    assert state.keys() - trained == {name for name in state if name.startswith("blocks.2")} != set()
    plain = Plain()
    plain.load_state_dict(saved)
    with torch.no_grad():
        found = [loss_of(plain(inputs), labels).item() for inputs, labels in data(99, COUNT)]
    assert sum(found) / COUNT == pytest.approx(loss, rel=1e-6)
