"""Optimizer state in every format survives a checkpoint: bit for bit in its own format, as numbers in another.

Moments in 8-bit codes are saved as the float32 numbers that they encode.  So a run resumes exactly, at any world
size, and a run in one format continues in another.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zckpt
import zcomm
import zengine
from zcomm.testing import run_ranks

NUM_STEPS, SAVED_AT = 6, 3
STRICT = {"stage3_unit_size": 200, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
ADAMW = ("AdamW", {"lr": 0.02, "weight_decay": 0.1})
ELEMENTWISE = [
    ADAMW,
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Lion", {"lr": 0.002}),
    ("Adagrad", {"lr": 0.05}),
]
SHAPED = [
    ("Lamb", {"lr": 0.02, "state_dtype": "8bit"}),
    ("Muon", {"lr": 0.02, "state_dtype": "8bit"}),
    ("Adafactor", {"lr": 0.02}),
]


class Net(nn.Module):
    """Sizes that are no multiples of a block, so parameters share scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(9, 31), nn.Tanh(), nn.Linear(31, 17), nn.Tanh(), nn.Linear(17, 1))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        x = batch.to(self.layers[0].weight.dtype)
        return (self.layers(x[:, :9]).squeeze(1) - x[:, 9]).square().mean()


def make(name: str, params: dict[str, Any], stage: int, **extra: Any) -> zengine.Engine:
    config = {
        "train_micro_batch_size_per_gpu": 8 // zcomm.group_size(),
        "optimizer": {"type": name, "params": params},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 400, **STRICT},
        **extra,
    }
    return zengine.initialize(model=Net(), config=config)[0]


def train(engine: zengine.Engine, until: int) -> list[float]:
    """Train to step `until`, with 8 samples a step at any world size."""
    losses = []
    for step in range(engine.global_steps, until):
        everyone = torch.randn(8, 10, generator=torch.Generator().manual_seed(step))
        engine.backward(engine(everyone.chunk(zcomm.group_size())[zcomm.group_rank()]))
        losses.append(engine.step().loss)
    return losses


def saved_state(root: str, tag: str) -> dict[str, torch.Tensor]:
    checkpoint = zckpt.find(root, tag)
    return {name: checkpoint.tensor(name) for name in checkpoint.names() if name.startswith("optimizer.")}


def _resume(root: str, name: str, params: dict[str, Any], stage: int, extra: dict[str, Any]) -> str:
    engine = make(name, params, stage, **extra)
    train(engine, SAVED_AT)
    engine.save_checkpoint(root)
    expected, final = train(engine, NUM_STEPS), engine.state_dict()
    resumed = make(name, params, stage, **extra)
    train(resumed, 1)  # drop the weights and the state of its first steps
    resumed.load_checkpoint(root)
    assert train(resumed, NUM_STEPS) == expected
    assert all(torch.equal(final[key], value) for key, value in resumed.state_dict().items())
    return "the same"


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
@pytest.mark.parametrize(("name", "params"), ELEMENTWISE, ids=[name for name, _ in ELEMENTWISE])
def test_a_run_resumes_bit_for_bit_in_its_format(tmp_path, name, params, state_dtype):
    options = {**params, "state_dtype": state_dtype}
    for world_size, stage in ((1, 0), (2, 2), (2, 3)):
        root = str(tmp_path / str(world_size))
        assert set(run_ranks(_resume, world_size, root, name, options, stage, {})) == {"the same"}


@pytest.mark.parametrize("state_dtype", ["bf16", "8bit"])
def test_formats_resume_beside_masters_too(tmp_path, state_dtype):
    options = {**ADAMW[1], "state_dtype": state_dtype}
    half = {"bf16": {"enabled": True}}
    assert set(run_ranks(_resume, 2, str(tmp_path), "AdamW", options, 1, half)) == {"the same"}


@pytest.mark.parametrize(("name", "params"), SHAPED, ids=[name for name, _ in SHAPED])
def test_optimizers_of_whole_tensors_resume_bit_for_bit(tmp_path, name, params):
    assert set(run_ranks(_resume, 2, str(tmp_path), name, params, 0, {})) == {"the same"}


def _save(root: str, state_dtype: str, stage: int) -> list[float]:
    engine = make("AdamW", {**ADAMW[1], "state_dtype": state_dtype}, stage)
    train(engine, SAVED_AT)
    engine.save_checkpoint(root, tag="first")
    return train(engine, NUM_STEPS)


def _load(root: str, state_dtype: str, stage: int) -> tuple[list[float], set[torch.dtype]]:
    """Load into another run and save at once; return later losses and the format of the moments."""
    engine = make("AdamW", {**ADAMW[1], "state_dtype": state_dtype}, stage)
    engine.load_checkpoint(root, tag="first")
    engine.save_checkpoint(root, tag="again")
    kept = {state[key].dtype for state in engine.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")}
    assert engine.optimizer.param_groups[0]["state_dtype"] == state_dtype
    return train(engine, NUM_STEPS), kept


@pytest.mark.parametrize(
    ("saved", "loaded", "dtype", "tolerance"),
    [
        ("8bit", "fp32", torch.float32, 0.0),
        ("bf16", "fp32", torch.float32, 0.0),
        ("fp32", "bf16", torch.bfloat16, 2**-8),
        ("fp32", "8bit", torch.uint8, 2**-4),
        ("bf16", "8bit", torch.uint8, 2**-4),
    ],
)
def test_a_run_in_one_format_continues_in_another(tmp_path, saved, loaded, dtype, tolerance):
    root = str(tmp_path)
    expected = _save(root, saved, 0)
    losses, kept = _load(root, loaded, 2)
    assert kept == {dtype}
    assert losses == pytest.approx(expected, rel=0.02)
    before, after = saved_state(root, "first"), saved_state(root, "again")
    assert before.keys() == after.keys()
    for name, value in before.items():
        floor = float(value.float().abs().max()) * tolerance / 8  # below the resolution of a block
        torch.testing.assert_close(after[name].float(), value.float(), rtol=tolerance, atol=floor)


@pytest.mark.parametrize(("stage", "other_stage"), [(2, 0), (1, 2)])
def test_codes_of_two_ranks_are_those_of_one(tmp_path, stage, other_stage):
    root = str(tmp_path)
    expected = run_ranks(_save, 2, root, "8bit", stage)[0]
    losses, kept = _load(root, "8bit", other_stage)
    assert kept == {torch.uint8}
    assert losses == pytest.approx(
        expected, rel=1e-2
    )  # sums over ranks round differently, and so does stochastic rounding
    before, after = saved_state(root, "first"), saved_state(root, "again")
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(not name.endswith("_scale") for name in before)
