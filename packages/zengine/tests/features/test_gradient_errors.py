"""Error feedback of quantized gradients (LoCo) in the engine: memory, loss scale, loads, and what it is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine.features import GradientErrors

WIDTH = 32


class Net(nn.Module):
    """Gradients of very different sizes, if one input is a hundred times as large as the others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def batch(rank: int) -> torch.Tensor:
    made = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(rank))
    made[:, 0] *= 100
    return made


def engine_of(feedback: bool = True, hop: int = 1, **more: Any) -> zengine.DeepSpeedEngine:
    zero: dict[str, Any] = {
        "stage": 3,
        "zero_quantized_gradients": True,
        "stage3_param_persistence_threshold": 0,
        "zero_hpz_partition_size": hop,
    }
    if feedback:
        zero["zeropp_loco_param"] = {"err_beta": 0.8, "reset_T": 1024}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.0}},  # the weights, and so the gradients, stay
        "zero_optimization": zero,
        **more,
    }
    return zengine.initialize(model=Net(), config=config)[0]


def reduced(engine: zengine.DeepSpeedEngine, num_steps: int) -> torch.Tensor:
    """Return the mean over steps of this rank's reduced gradients, (elements,) float64."""
    found = []

    class Keep(zengine.features.Feature):
        def gradients_ready(self, partition: zpartition.Partition) -> None:
            own = [part.double().clone() for _, part in partition.named_gradients()]
            found.append(torch.cat([*own, torch.zeros(1, dtype=torch.float64)]))  # a rank may have padding alone

    engine.add_feature(Keep())
    for _ in range(num_steps):
        engine.backward(engine(batch(zcomm.group_rank())))
        engine.step()
    return torch.stack(found).mean(0)


def mean_error(feedback: bool, hop: int, num_steps: int) -> float:
    engine = engine_of(feedback, hop)
    mean = reduced(engine, num_steps)
    engine.close()
    plain = zengine.initialize(
        model=Net(),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "gradient_clipping": 0.0,
            "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        },
    )[0]
    exact = reduced(plain, 1)
    plain.close()
    return float((mean - exact).norm() / exact.norm().clamp(min=1e-12))


@pytest.mark.parametrize("hop", [1, 2])
def test_the_error_of_the_mean_gradient_falls(hop: int) -> None:
    num_ranks = 2 * hop
    without = max(run_ranks(mean_error, num_ranks, False, hop, 5))  # the same in each step
    short, long = (max(run_ranks(mean_error, num_ranks, True, hop, steps)) for steps in (20, 160))
    assert without > 0.01
    assert long < without / 5
    assert long < short / 4


def ledgers() -> tuple[dict[str, int], dict[str, int]]:
    engine = engine_of()
    reduced(engine, 2)
    live = engine.parts.partition.ledger()
    planned = zpartition.plan(Net(), policy=engine.plan.zero, world_size=zcomm.group_size()).ledger()
    engine.close()
    return live, planned


def test_the_plan_counts_the_errors() -> None:
    for live, planned in run_ranks(ledgers, 2):
        assert live["gradient errors"] == planned["gradient errors"] > 0


def scaled() -> tuple[list[float], list[float]]:
    """Return the largest error beside the loss scale, before and after the scale grew."""
    engine = engine_of(fp16={"enabled": True, "initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1})
    largest, scales = [], []
    for _ in range(6):
        engine.backward(engine(batch(zcomm.group_rank()).half()))
        report = engine.step()
        assert report is not None
        scales.append(float(engine.parts.scaler.factor))
        of_rank = [
            zcomm.BlockCode(bits=8).decode(stored, torch.empty(numel)).abs().max().item()
            for errors in engine.parts.partition.gradient_errors()
            for numel, stored in errors._errors.values()
        ]
        largest.append(max(of_rank) / scales[-1])
    engine.close()
    return largest, scales


def test_errors_follow_the_loss_scale() -> None:
    for largest, scales in run_ranks(scaled, 2):
        assert scales[0] < scales[-1]
        # the gradients stay, so the largest error grows by the same amount in each step, until it shows in a code
        assert largest == pytest.approx([largest[0] * (step + 1) for step in range(6)], rel=0.05)


def loads(folder: str) -> tuple[int, int]:
    engine = engine_of()
    reduced(engine, 1)
    before = sum(errors.num_bytes for errors in engine.parts.partition.gradient_errors())
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder)
    after = sum(errors.num_bytes for errors in engine.parts.partition.gradient_errors())
    engine.close()
    return before, after


def test_a_load_begins_without_errors(tmp_path: Any) -> None:
    for before, after in run_ranks(loads, 2, str(tmp_path)):
        assert before > 0
        assert after == 0


def absent() -> tuple[list[str], int]:
    engine = engine_of(feedback=False)
    reduced(engine, 1)
    names = [type(feature).__name__ for feature in engine._features]
    found = list(engine.parts.partition.gradient_errors())
    engine.close()
    return names, len(found)


def test_off_is_absent() -> None:
    for names, num_errors in run_ranks(absent, 2):
        assert GradientErrors.__name__ not in names
        assert num_errors == 0
