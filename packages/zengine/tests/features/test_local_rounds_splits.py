"""DiLoCo over groups whose ranks split a model, with loss scales of their own, and with signals."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.features.local_rounds import LocalRounds
from zengine.features.signals import StoppedBySignal
from zengine.testing import rank_batch, small_engine
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.testing.tensor_models import Language

ROUND, STEPS, WIDTH = 2, 5, 8


def config(**more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "diloco": {"sync_every": ROUND},
        **more,
    }


def rounds_of(engine: zengine.Engine) -> LocalRounds:
    return next(feature for feature in engine._features if isinstance(feature, LocalRounds))


# -- splits ----------------------------------------------------------------------------------------


def tokens(step: int, replica: int) -> torch.Tensor:
    return torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(100 * step + replica))


def language(tensor: int) -> dict[str, torch.Tensor]:
    splits = {"tensor_parallel": {"autotp_size": tensor}} if tensor > 1 else {}
    data = [tokens(0, replica)[0] for replica in range(8)]  # the plan of the split is inferred from it
    engine = zengine.initialize(model=Language(), training_data=data, config=config(**splits))[0]
    replica = engine.parts.groups.get_data_parallel_rank()
    for step in range(STEPS):
        engine.backward(engine(tokens(step, replica)))
        engine.step()
    found = {name: value.clone() for name, value in engine.state_dict().items()}
    engine.close()
    return {"replica": torch.tensor(replica), **found}


def test_groups_may_split_layers() -> None:
    whole = {int(found["replica"]): found for found in run_ranks(language, 2, 1)}
    for found in run_ranks(language, 4, 2):
        for name, value in whole[int(found["replica"])].items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=2e-4, msg=name)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def pair(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(2, 2, WIDTH, generator=torch.Generator().manual_seed(100 * step + replica))
    return made[0], made[1]


def pipeline(num_stages: int) -> tuple[int, list[float]]:
    torch.manual_seed(5)
    layers = [LayerSpec(Block) for _ in range(4)]
    model = PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss)
    engine = zengine.initialize(model=model, config=config())[0]
    assert isinstance(engine, zengine.PipelineEngine)
    replica = engine.parts.groups.get_data_parallel_rank()
    losses = [float(engine.train_batch(iter([pair(step, replica)]))) for step in range(2 * STEPS)]
    engine.close()
    return replica, losses


def test_groups_may_be_pipelines() -> None:
    whole = dict(run_ranks(pipeline, 2, 1))
    assert whole[0] != whole[1]
    for replica, losses in run_ranks(pipeline, 4, 2):
        assert losses == pytest.approx(whole[replica], rel=1e-4)


# -- what groups decide by themselves --------------------------------------------------------------


def scaled(folder: str, resumes: bool) -> tuple[list[str], list[float], dict[str, torch.Tensor]]:
    """Train in fp16; the second group overflows once.  Return reasons, scales and weights."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1, "loss_scale_window": 3}}
    schedule = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 9}}}
    engine = small_engine(**fp16, **schedule, diloco={"sync_every": 3})
    reasons, scales = [], []
    for step in range(8):
        if resumes and step == 4:
            engine.save_checkpoint(folder)
            engine.close()
            engine = small_engine(**fp16, **schedule, diloco={"sync_every": 3})
            engine.load_checkpoint(folder)
        batch = rank_batch(step).half()
        engine.backward(engine(batch * (6e4 if step == 1 and zcomm.group_rank() else 1)))
        report = engine.step()
        assert report is not None
        reasons.append(report.reason)
        scales.append(report.loss_scale)
    found = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return reasons, scales, found


def test_a_group_skips_and_scales_alone_and_resumes_bit_for_bit(tmp_path: Any) -> None:
    first, second = run_ranks(scaled, 2, "", False)
    assert not any(first[0])
    assert second[0][1]
    assert first[1] != second[1]
    for expected, (reasons, scales, weights) in zip((first, second), run_ranks(scaled, 2, str(tmp_path), True)):
        assert [bool(reason) for reason in reasons] == [bool(reason) for reason in expected[0]]
        assert scales == expected[1]
        assert all(torch.equal(weights[name], value) for name, value in expected[2].items())


def signalled(folder: str) -> tuple[int, str]:
    engine = small_engine(diloco={"sync_every": 4}, signals={"save_dir": folder})
    for step in range(1, 20):
        if step == 2 and zcomm.group_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        engine.backward(engine(rank_batch(step)))
        try:
            engine.step()
        except StoppedBySignal as stopped:
            engine.close()
            return step, stopped.signals[0]
    raise AssertionError("the signal was not served")


def test_a_signal_is_served_at_the_end_of_the_round(tmp_path: Any) -> None:
    assert run_ranks(signalled, 2, str(tmp_path)) == [(4, "SIGTERM on rank 1")] * 2


def unfrozen() -> str:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    model[0].requires_grad_(False)
    engine = zengine.initialize(
        model=model,
        optimizer=torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[1].parameters()}], lr=0.1),
        config={"train_micro_batch_size_per_gpu": 2, "diloco": {"sync_every": 4}},
    )[0]
    model[0].requires_grad_(True)
    try:
        for step in range(3):
            engine.backward(engine(rank_batch(step)).square().mean())
            engine.step()
    except ValueError as error:
        return str(error)
    return ""


def test_parameters_unfrozen_in_a_run_are_rejected() -> None:
    assert "unfreeze them" in unfrozen()
