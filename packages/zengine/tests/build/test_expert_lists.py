"""Experts in an `nn.ModuleList`: trained over expert ranks as in one process, and saved for any number of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import zengine
import zpartition
from zcomm.testing import run_ranks
from zpartition.testing.expert_list_models import WIDTH, ListModel

STEPS, CLIP = 3, 0.05


def config(stage: int, expert: int, **others: Any) -> dict[str, Any]:
    asked = {"expert_parallel": {"enabled": True, "autoep_size": expert}} if expert > 1 else {}
    zero = {"stage": stage, "stage3_param_persistence_threshold": 20, "reduce_bucket_size": 300}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIP,
        "zero_optimization": zero,
        **asked,
        **others,
    }


def batch(step: int, micro: int, replica: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + replica)
    return torch.randn(2, 3, WIDTH, generator=generator, dtype=torch.float64)


def steps(engine: Any, first: int, last: int) -> tuple[list[float], list[float]]:
    replica = engine.parts.groups.get_data_parallel_rank()
    losses, norms = [], []
    for step in range(first, last):
        for micro in range(2):
            engine.backward(engine(batch(step, micro, replica)))
            report = engine.step()
        losses.append(report.loss)
        norms.append(report.grad_norm)
    return losses, norms


def alone(replicas: int, num_steps: int = STEPS) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = ListModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, norms = [], []
    for step in range(num_steps):
        total = 0.0
        for micro in range(2):
            for replica in range(replicas):
                loss = model(batch(step, micro, replica)) / (2 * replicas)
                loss.backward()
                total += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model.state_dict()


def _train(stage: int, expert: int, replicas: int) -> tuple[list[float], list[float], float, list[str]]:
    model = ListModel()
    names = [name for name, _ in model.named_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)  # made before: parameters keep their identities
    engine, *_ = zengine.initialize(model=model, optimizer=optimizer, config=config(stage, expert))
    losses, norms = steps(engine, 0, STEPS)
    found = zpartition.tensor.whole_state_dict(engine.module)
    expected = alone(replicas)[2]
    apart = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    engine.close()
    return losses, norms, apart, [name for name in found if name not in names]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(("world_size", "expert"), [(2, 2), (4, 2), (4, 4)])
def test_training_equals_one_process(stage: int, world_size: int, expert: int) -> None:
    losses, norms, _ = alone(world_size)
    assert min(norms) > CLIP, "clipping is exercised"
    for ours, our_norms, apart, renamed in run_ranks(_train, world_size, stage, expert, world_size):
        assert ours == pytest.approx(losses, rel=1e-9)
        assert our_norms == pytest.approx(norms, rel=1e-9)
        assert apart < 1e-8
        assert not renamed


def _save(folder: str, stage: int, expert: int) -> None:
    model = ListModel()
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    engine, *_ = zengine.initialize(model=model, config=config(stage, expert, optimizer=optimizer))
    steps(engine, 0, 2)
    engine.save_checkpoint(folder, tag="two")
    engine.save_16bit_model(folder, "whole.safetensors")
    engine.close()


def _resume(folder: str, stage: int, expert: int) -> tuple[list[float], list[float]]:
    torch.manual_seed(9)
    model = ListModel()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    engine, *_ = zengine.initialize(model=model, config=config(stage, expert, optimizer=optimizer))
    engine.load_checkpoint(folder, tag="two")
    found = steps(engine, 2, 4)
    engine.close()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_loads_at_any_number_of_expert_ranks(stage: int, tmp_path: Path) -> None:
    run_ranks(_save, 4, str(tmp_path), stage, 2)
    losses, norms, _ = alone(4, 4)
    for expert, at_stage in ((1, 0), (2, stage), (4, 4 - stage)):
        for ours, our_norms in run_ranks(_resume, 4, str(tmp_path), at_stage, expert):
            assert ours == pytest.approx(losses[2:], rel=1e-9)
            assert our_norms == pytest.approx(norms[2:], rel=1e-9)


def test_an_export_has_the_names_of_the_model(tmp_path: Path) -> None:
    run_ranks(_save, 2, str(tmp_path), 3, 2)
    found = safetensors.torch.load_file(tmp_path / "whole.safetensors")
    expected = alone(2, 2)[2]
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)


def _with_tensor_ranks() -> list[float]:
    specs = [{"patterns": [r".*w[13]\.weight"]}, {"patterns": [".*w2.*"], "partition_type": "row"}]
    asked = {"tensor_parallel": {"autotp_size": 2, "partition_config": {"layer_specs": specs}}}
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    engine, *_ = zengine.initialize(model=ListModel(), config=config(2, 2, optimizer=optimizer, **asked))
    assert engine.module.layers[0].experts[0].w1.weight.shape[0] in (0, 12)  # whole, on one of two expert ranks
    losses, _ = steps(engine, 0, STEPS)
    engine.close()
    return losses


def test_tensor_ranks_keep_experts_of_a_list_whole() -> None:
    for losses in run_ranks(_with_tensor_ranks, 4):
        assert losses == pytest.approx(alone(2)[0], rel=1e-9)


def _without_memory() -> list[float]:
    with zpartition.Init():
        model = ListModel()
    optimizer = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.01}}
    engine, *_ = zengine.initialize(model=model, config=config(3, 2, optimizer=optimizer))
    losses, _ = steps(engine, 0, STEPS)
    engine.close()
    return losses


def test_a_model_built_inside_init_is_distributed() -> None:
    for losses in run_ranks(_without_memory, 2):
        assert losses == pytest.approx(alone(2)[0], rel=1e-9)
