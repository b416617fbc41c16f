"""Learning rates that follow the batch size: by hand, under any schedule, after a resume, on two ranks."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine
from zcomm.testing import run_ranks
from zengine.features import BackgroundSaves
from zengine.features.dynamic_batching import lr_factor
from zpartition.pipeline import PipelineModule

LENGTHS = [1 + (7 * index) % 11 for index in range(64)]
DATA = [torch.full((length,), 0.1 * index) for index, length in enumerate(LENGTHS)]


def collate(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.stack((sample.mean(), torch.tensor(float(len(sample))))) for sample in samples])


def engine_of(model: nn.Module | None = None, **changes: Any) -> Any:
    torch.manual_seed(0)
    batching = {"enabled": True, "max_tokens": 20, "sequence_picking_order": "random", **changes.pop("batching", {})}
    config = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": batching}},
        **changes,
    }
    engine, _, loader, _ = zengine.initialize(
        model=model or nn.Linear(2, 1), config=config, training_data=DATA, collate_fn=collate
    )
    return engine, loader


def train(engine: Any, batches: Any, steps: int) -> list[Any]:
    reports = []
    while len(reports) < steps:
        batch = next(batches)
        engine.backward((engine(batch) - 1).square().mean())
        report = engine.step()
        reports += [report] if report is not None else []
    return reports


def test_factors_by_hand() -> None:
    assert lr_factor("linear", 12, 8) == 1.5
    assert lr_factor("sqrt", 2, 8) == 0.5
    assert lr_factor("none", 2, 8) == 1.0


@pytest.mark.parametrize("method", ["linear", "sqrt", "none"])
def test_the_rate_of_a_step_follows_its_samples_and_the_schedule_never_sees_it(method: str) -> None:
    """torch's ExponentialLR multiplies what it finds in the group."""
    scheduler = {"type": "ExponentialLR", "params": {"gamma": 0.5}}
    engine, loader = engine_of(batching={"lr_scaling_method": method}, scheduler=scheduler)
    batches, seen = iter(loader), 0
    for step in range(6):
        (report,) = train(engine, batches, 1)
        size, seen = loader.samples_handed - seen, loader.samples_handed
        assert math.isclose(report.lr[0], 0.01 * 0.5**step * lr_factor(method, size, 4))
        assert engine.get_lr() == pytest.approx([0.01 * 0.5 ** (step + 1)])
        assert report.samples == seen == engine.global_samples


def test_scaling_is_a_step_at_that_rate() -> None:
    """A step of `size` samples equals one of a plain engine with its rate set to lr * size / 4."""
    engine, loader = engine_of()
    batch = next(iter(loader))
    assert len(batch) != 4
    plain = zengine.initialize(
        model=nn.Linear(2, 1),
        config={
            "train_batch_size": 4,
            "gradient_clipping": 0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01 * len(batch) / 4}},
        },
    )[0]
    plain.module.load_state_dict(engine.module.state_dict())
    for each in (engine, plain):
        each.backward((each(batch) - 1).square().mean())
        each.step()
    assert torch.equal(engine.module.weight, plain.module.weight)


def test_a_resume_in_the_middle_of_an_epoch_equals_the_run(tmp_path: Path) -> None:
    first, loader = engine_of()
    batches = iter(loader)
    train(first, batches, 3)
    first.save_checkpoint(tmp_path)
    second, other = engine_of()
    second.load_checkpoint(tmp_path)
    assert train(second, iter(other), 4) == train(first, batches, 4)
    assert torch.equal(first.module.weight, second.module.weight)


def test_a_step_that_failed_and_begins_again_counts_its_last_attempt() -> None:
    engine, loader = engine_of(train_batch_size=8, gradient_accumulation_steps=2)
    batches = iter(loader)
    engine.backward(engine(next(batches)).mean())
    engine.step()
    with pytest.raises(ValueError, match="scalar"):
        engine.backward(engine(next(batches)))
    before = loader.samples_handed
    (report,) = train(engine, batches, 1)
    assert report.samples == loader.samples_handed - before
    assert report.lr == pytest.approx((0.01 * report.samples / 8,))


def _on_two_ranks() -> list[tuple[Any, ...]]:
    engine, loader = engine_of(train_batch_size=8, gradient_accumulation_steps=2)
    return [(report.samples, report.lr) for report in train(engine, iter(loader), 4)] + [(len(loader),)]


def test_ranks_agree_on_the_size_of_a_step() -> None:
    left, right = run_ranks(_on_two_ranks, 2)
    assert left == right
    assert all(rates[0] == pytest.approx(0.01 * size / 8) for size, rates in zip(_sizes(left), _rates(left)))


def _weighted(accumulation: int) -> list[tuple[int, float, float]]:
    engine, loader = engine_of(train_batch_size=8, gradient_accumulation_steps=accumulation)
    told: list[tuple[int, float, float]] = []
    for batch in zengine.data.forever(loader):
        engine.backward((engine(batch) - 1).square().mean(), weight=len(batch))
        report = engine.step()
        told += [(report.samples, report.loss, report.lr[0])] if report is not None else []
        if len(told) == 6:
            return told
    return told


def test_weighted_steps_are_the_same_on_two_ranks_as_on_one() -> None:
    """Micro-batches of unequal size: two a step, of one rank after the other or of both at once."""
    left, right = run_ranks(_weighted, 2, 1)
    assert left == right
    for mine, alone in zip(left, _weighted(2)):
        assert mine == pytest.approx(alone, rel=1e-6)


def _sizes(told: list[tuple[Any, ...]]) -> list[int]:
    samples = [0, *(entry[0] for entry in told[:-1])]
    return [after - before for before, after in pairwise(samples)]


def _rates(told: list[tuple[Any, ...]]) -> list[tuple[float, ...]]:
    return [entry[1] for entry in told[:-1]]


def test_a_step_whose_update_failed_is_counted_once() -> None:
    engine, loader = engine_of()
    batches = iter(loader)
    train(engine, batches, 2)

    def fail(*_: Any) -> None:
        raise OSError("a drive is gone")

    hook = engine.optimizer.register_step_pre_hook(fail)
    with pytest.raises(OSError, match="a drive is gone"):
        train(engine, batches, 1)
    hook.remove()
    lost = loader.last_samples
    (report,) = train(engine, batches, 1)
    assert report.samples == loader.samples_handed - lost
    assert report.lr == pytest.approx((0.01 * loader.last_samples / 4,))


def test_a_step_that_a_failed_save_interrupts_is_counted_once() -> None:
    class Failed:
        def check(self) -> None:
            raise OSError("the disk is full")

    engine, loader = engine_of(checkpoint={"async_save": True})
    (saves,) = (feature for feature in engine._features if isinstance(feature, BackgroundSaves))
    batches, healthy = iter(loader), saves.checkpoints
    train(engine, batches, 2)
    saves.checkpoints = Failed()
    with pytest.raises(OSError, match="the disk is full"):
        train(engine, batches, 1)
    lost, saves.checkpoints = loader.last_samples, healthy
    train(engine, batches, 2)
    assert engine.global_samples == loader.samples_handed - lost
    assert engine.global_steps == 4
    engine.close()


def labelled(samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return collate(samples), torch.ones(len(samples), 1)


def in_stages(num_stages: int) -> list[tuple[float, ...]]:
    torch.manual_seed(0)
    layers = [nn.Linear(2, 3), torch.tanh, nn.Linear(3, 2), nn.Linear(2, 1)]
    model = PipelineModule(layers, num_stages, loss_fn=nn.functional.mse_loss, dynamic_shape=True)
    batching = {"enabled": True, "max_tokens": 20, "sequence_picking_order": "random"}
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 8 * num_stages // world_size() // 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "data_efficiency": {"enabled": True, "data_sampling": {"enabled": True, "dynamic_batching": batching}},
    }
    engine, _, loader, _ = zengine.initialize(model=model, config=config, training_data=DATA, collate_fn=labelled)
    found = []
    for _ in range(5):
        engine.train_batch()
        report = engine.last_report
        assert report.samples == loader.samples_handed == engine.global_samples
        found.append((report.loss, report.samples, report.lr[0], report.grad_norm))
    engine.close()
    return found


def world_size() -> int:
    return torch.distributed.get_world_size()


def test_the_stages_of_a_pipeline_follow_the_batch_alike() -> None:
    """By one stage, over as many replicas."""
    for world, num_stages, replicas in ((2, 2, 1), (3, 3, 1), (4, 2, 2)):
        expected = run_ranks(in_stages, replicas, 1)[0]
        assert len({samples for _, samples, _, _ in expected}) > 1
        for found in run_ranks(in_stages, world, num_stages):
            for ours, its in zip(found, expected, strict=True):
                assert ours == pytest.approx(its, rel=1e-5)


def test_a_pipeline_has_to_be_made_for_changing_shapes() -> None:
    for text in run_ranks(_fixed_shapes, 2):
        assert "dynamic_batching.enabled = true: micro-batches then have different numbers of samples" in text
        assert "dynamic_shape=True" in text


def _fixed_shapes() -> str:
    model = PipelineModule([nn.Linear(2, 2), nn.Linear(2, 1)], 2, loss_fn=nn.functional.mse_loss)
    with pytest.raises(zengine.ConfigError) as caught:
        engine_of(model=model)
    return str(caught.value)
