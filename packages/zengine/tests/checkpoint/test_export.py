"""Export of whole weights at every stage, by the names that integrations call."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks


class Tied(nn.Module):
    """A tied weight, a frozen one, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Linear(6, 4, bias=False)
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(6, 4, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.embed(x))) @ self.head.weight


def engine_of(stage: int, **config: Any) -> zengine.Engine:
    base = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    return zengine.initialize(model=Tied(), config={**base, **config})[0]


def trained(stage: int, **config: Any) -> zengine.Engine:
    engine = engine_of(stage, **config)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(5)).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    return engine


def check_exports(folder: str) -> list[str]:
    """All ways out, at three stages, compared with the module's own state dict."""
    done = []
    for stage in (0, 2, 3):
        engine = trained(stage, bf16={"enabled": True})
        where = Path(folder) / str(stage)
        assert engine.save_16bit_model(str(where)) is True
        assert engine.save_fp16_model(str(where), "trained.bin", exclude_frozen_parameters=True) is True
        whole = {name: value.clone() for name, value in engine.module_state_dict().items()}
        consolidated = engine._zero3_consolidated_16bit_state_dict()
        assert engine.zero_gather_16bit_weights_on_model_save()
        assert engine.zero_optimization_partition_weights() is (stage == 3)
        assert engine.zero_optimization_partition_gradients() is (stage >= 2)
        if zcomm.group_rank() == 0:
            assert consolidated is not None
            for found in (torch.load(where / "pytorch_model.bin", weights_only=True), consolidated):
                assert found.keys() == whole.keys()
                assert all(torch.equal(found[name], whole[name]) for name in whole)
            partly = torch.load(where / "trained.bin", weights_only=True)
            assert whole.keys() - partly.keys() == {"frozen.weight", "frozen.bias"}
        else:
            assert consolidated is None
        without = engine.module_state_dict(exclude_frozen_parameters=True)
        assert whole.keys() - without.keys() == {"frozen.weight", "frozen.bias"}
        done.append(f"stage {stage}: {len(whole)} tensors")
        zcomm.barrier()
        engine.close()
    return done


def test_every_stage_exports_what_the_module_shows_on_two_ranks(tmp_path: Path):
    results = run_ranks(check_exports, 2, str(tmp_path))
    assert results[0] == ["stage 0: 9 tensors", "stage 2: 9 tensors", "stage 3: 9 tensors"]


def check_failure() -> None:
    engine = trained(3)
    with tempfile.NamedTemporaryFile() as file:
        told = "no weights were written, because of rank 0" if zcomm.group_rank() else "Not a directory|File exists"
        with pytest.raises((ValueError, OSError), match=told):
            engine.save_16bit_model(file.name)  # a file where a folder should be
    assert torch.isfinite(engine(torch.ones(3, 6))).all()


def test_a_rank_0_that_cannot_write_is_an_error_on_every_rank_and_the_engine_goes_on():
    run_ranks(check_failure, 2)


def check_parked(folder: str) -> list[str]:
    told = []
    for stage in (1, 3):
        engine = trained(stage)
        engine.offload_states()
        with pytest.raises(RuntimeError) as caught:
            engine.save_16bit_model(folder)
        told.append(str(caught.value))
        engine.reload_states()
        assert engine.save_16bit_model(folder)
        engine.close()
    return told


def test_weights_that_are_away_are_an_error_on_every_rank_and_nobody_waits(tmp_path: Path):
    for told in run_ranks(check_parked, 2, str(tmp_path)):
        assert all("reload_states" in each for each in told)


def test_weights_come_back_from_a_state_dict_and_from_deepspeeds_nesting():
    engine, other = trained(2), engine_of(2)
    state = {name: value.clone() for name, value in engine.module_state_dict().items()}
    other.load_module_state_dict({"module": state, "global_steps": 4})
    assert all(torch.equal(value, state[name]) for name, value in other.module_state_dict().items())
    zeros = {name: torch.zeros_like(value) for name, value in state.items()}

    def load(src: dict[str, torch.Tensor], dst: nn.Module) -> None:
        dst.load_state_dict(src)

    other.load_module_state_dict(zeros, custom_load_fn=load)
    assert not other.module_state_dict()["embed.weight"].any()
    with pytest.raises(RuntimeError, match="Missing key"):
        other.load_module_state_dict({"embed.weight": state["embed.weight"]})


def test_a_closed_engine_exports_nothing():
    engine = engine_of(1)
    engine.close()
    with pytest.raises(zengine.CallOrderError, match="save_16bit_model"):
        engine.save_16bit_model("nowhere")
