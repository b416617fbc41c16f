"""Whole float32 weights out of checkpoints of both kinds."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import zckpt
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.utils import zero_to_fp32 as tools


def model() -> nn.Module:
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    net[2].bias.requires_grad_(False)
    return net


def save_at(stage: int, folder: str) -> dict[str, torch.Tensor]:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    engine = deepspeed.initialize(model=model(), config=config)[0]
    engine.backward(engine(torch.randn(2, 4).bfloat16()).float().square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag="now", client_state={"epoch": 2, "average": torch.arange(3.0)})
    found = {
        name: deepspeed.utils.safe_get_full_fp32_param(p)
        for name, p in engine.module.named_parameters()
        if p.requires_grad
    }
    engine.destroy()
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_ranks(save_at, 2, 3, str(folder))[0]


def test_the_script_beside_the_checkpoint_writes_the_weights(
    saved: tuple[Path, dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
):
    folder, found = saved
    assert os.access(folder / "zero_to_fp32.py", os.X_OK)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["zero_to_fp32.py", ".", "whole", "--safe_serialization"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path("zero_to_fp32.py", run_name="__main__")
    written = safetensors.torch.load_file(folder / "whole/model.safetensors")
    for name, weight in found.items():
        torch.testing.assert_close(written[name], weight, rtol=0, atol=0)


def test_converters_find_the_small_state_in_files_of_torch(saved: tuple[Path, dict[str, torch.Tensor]]):
    """As Lightning's converter reads it."""
    checkpoint = str(saved[0] / "now")
    (optimizer,) = tools.get_optim_files(checkpoint)
    stage = torch.load(optimizer)["optimizer_state_dict"]["zero_stage"]
    assert stage == 3
    file = tools.get_model_state_file(checkpoint, stage)
    assert Path(file).name == "zero_pp_rank_0_mp_rank_00_model_states.pt"
    assert tools.get_model_state_files(checkpoint) == [file]
    state = torch.load(file)
    assert (state["epoch"], state["global_steps"], state["dp_world_size"]) == (2, 1, 2)
    assert state["average"].tolist() == [0, 1, 2]
    with pytest.raises(FileNotFoundError, match=r"mp_rank_00_model_states.pt' \(ZeRO stage 1\)"):
        tools.get_model_state_file(checkpoint, 1)
    with pytest.raises(FileNotFoundError, match="absent' doesn't exist"):
        tools.get_optim_files(str(saved[0] / "absent"))
    with pytest.raises(FileNotFoundError, match=r"can't find \*_optim_states.pt files in directory"):
        tools.get_optim_files(str(saved[0]))


def test_files_of_deepspeed_are_listed_in_the_order_of_their_ranks(tmp_path: Path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2, 10)]
    for name in [*reversed(names), "mp_rank_00_model_states.pt"]:
        (tmp_path / name).touch()
    assert [Path(path).name for path in tools.get_optim_files(tmp_path)] == names
    assert tools.get_model_state_file(tmp_path, 2) == str(tmp_path / "mp_rank_00_model_states.pt")


def test_masters_of_a_stage_3_run_come_out_whole(saved: tuple[Path, dict[str, torch.Tensor]]):
    folder, masters = saved
    state = tools.get_fp32_state_dict_from_zero_checkpoint(folder)
    assert state.keys() == model().state_dict().keys()
    assert all(torch.equal(state[name], value) for name, value in masters.items())
    assert state["1.num_batches_tracked"].dtype == torch.int64
    trained = tools.get_fp32_state_dict_from_zero_checkpoint(folder, "now", exclude_frozen_parameters=True)
    assert state.keys() - trained.keys() == {"2.bias"}  # buffers stay, and weights whose optimizer has no state


@pytest.mark.parametrize("safe", [True, False])
def test_they_are_written_in_files_of_a_size(saved: tuple[Path, dict[str, torch.Tensor]], safe: bool, tmp_path: Path):
    folder, masters = saved
    arguments = [str(folder), str(tmp_path), "--max_shard_size", "0.1KB", *(["--safe_serialization"] if safe else [])]
    assert tools.main(arguments) == 0
    ending = "safetensors" if safe else "bin"
    (index,) = tmp_path.glob("*.index.json")
    table = json.loads(index.read_text())["weight_map"]
    assert len(set(table.values())) > 1
    found: dict[str, torch.Tensor] = {}
    for path in sorted(tmp_path.glob(f"*.{ending}")):
        found.update(safetensors.torch.load_file(path) if safe else torch.load(path, weights_only=True))
    assert found.keys() == table.keys()
    assert all(torch.equal(found[name], value) for name, value in masters.items())


def test_a_model_takes_them_and_another_one_keeps_its_own(
    saved: tuple[Path, dict[str, torch.Tensor]], caplog: pytest.LogCaptureFixture
):
    folder, masters = saved
    loaded = tools.load_state_dict_from_zero_checkpoint(model(), folder)
    assert torch.equal(loaded[0].weight, masters["0.weight"])
    other = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2), nn.Linear(2, 2))
    own = other[3].weight.clone()
    assert tools.load_state_dict_from_zero_checkpoint(other, folder) is other  # as in DeepSpeed: not strict
    assert torch.equal(other[0].weight, masters["0.weight"])
    assert torch.equal(other[3].weight, own)
    assert "the checkpoint lacks 2 names: 3.bias, 3.weight" in caplog.text


def test_nothing_there_is_an_error_that_names_the_place(tmp_path: Path):
    with pytest.raises(zckpt.CheckpointNotFound, match=str(tmp_path)):
        tools.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


@pytest.mark.parametrize(("text", "nbytes"), [("5GB", 5_000_000_000), ("1.5KiB", 1536), (7, 7), (None, 1 << 62)])
def test_sizes_are_read_as_they_are_written(text, nbytes):
    assert tools._parse_size(text) == nbytes
    with pytest.raises(ValueError, match="is not a size"):
        tools._parse_size("five")
