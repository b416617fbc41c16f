"""Exports contain a tied weight under each of its names, so that a plain model loads them with strict=True."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import zckpt
import zcomm
import zengine.deepspeed as deepspeed
from zckpt.interchange import export_huggingface, import_weights
from zcomm.testing import run_ranks
from zengine.deepspeed.utils import zero_to_fp32
from zpartition.pipeline import LayerSpec, PipelineModule, TiedLayerSpec

FIXTURES = Path(__file__).resolve().parents[2] / "packages/zckpt/tests/fixtures/deepspeed"
sys.path.insert(0, str(FIXTURES))
import tiny  # noqa: E402 - the model that the fixtures were made with

State = dict[str, torch.Tensor]


class Tied(nn.Module):
    """A head tied to the embedding, and a layer used under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(8, 4)
        self.body = nn.Linear(4, 4)
        self.again = self.body
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.again(self.norm(self.body(self.embed(x)).tanh())))


def config(stage: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, "stage3_unit_size": 1},
    }


def train(stage: int, folder: str) -> State | None:
    """Save a run and both kinds of 16-bit files (float32 here); return the whole state dict of rank 0."""
    engine = deepspeed.initialize(model=Tied(), config=config(stage))[0]
    x = torch.arange(4) + 4 * zcomm.group_rank()
    engine.backward(engine(x).square().mean())
    engine.step()
    engine.save_checkpoint(folder)
    for name in ("pytorch_model.bin", "model.safetensors"):
        engine.save_16bit_model(f"{folder}/16bit", name)
    state = engine._consolidated_16bit_state_dict()
    engine.destroy()
    return state


def load_strict(given: State, expected: State) -> bool:
    """Load with strict=True and compare the values of every name."""
    model = Tied()
    model.load_state_dict(given, strict=True)
    found = model.state_dict()
    assert model.head.weight is model.embed.weight
    return given.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def converted(folder: str, target: Path, *options: str) -> State:
    """Return the values in all files that the command line writes."""
    assert zero_to_fp32.main([folder, str(target), *options]) == 0
    found: State = {}
    for path in (each for each in target.iterdir() if each.suffix in (".bin", ".safetensors")):
        is_torch = path.suffix == ".bin"
        found |= torch.load(path, weights_only=True) if is_torch else safetensors.torch.load_file(path)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_export_loads_with_strict(stage: int, world: int, tmp_path: Path) -> None:
    run = str(tmp_path / "run")
    state = run_ranks(train, world, stage, run)[0]
    assert state is not None
    assert {"head.weight", "again.weight", "again.bias", "norm.running_mean"} <= state.keys()
    assert load_strict(state, state)
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(run)
    assert load_strict(found, state)
    assert found["head.weight"] is found["embed.weight"]
    loaded = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), run)
    assert torch.equal(loaded.head.weight, state["embed.weight"])
    for number, options in enumerate(([], ["--max_shard_size", "0.1KB"])):
        assert load_strict(converted(run, tmp_path / f"bin{number}", *options), state)
        assert load_strict(converted(run, tmp_path / f"safe{number}", *options, "--safe_serialization"), state)
    assert load_strict(torch.load(tmp_path / "run/16bit/pytorch_model.bin", weights_only=True), state)
    exported = export_huggingface(zckpt.find(run), tmp_path / "hf") / "model.safetensors"
    for file in (tmp_path / "run/16bit/model.safetensors", exported):
        model = Tied()
        assert safetensors.torch.load_model(model, file, strict=True) == (set(), [])
        assert load_strict(model.state_dict(), state)


def load(root: str) -> State:
    engine = deepspeed.initialize(model=Tied(), config=config(3))[0]
    engine.load_checkpoint(root, load_module_only=True)
    state = engine.module_state_dict()
    engine.destroy()
    return dict(state)


@pytest.mark.parametrize("file", ["safe/model.safetensors", "run/16bit/model.safetensors", "bin/pytorch_model.bin"])
def test_exports_are_imported_with_their_ties(file: str, tmp_path: Path) -> None:
    state = run_ranks(train, 1, 2, str(tmp_path / "run"))[0]
    assert state is not None
    converted(str(tmp_path / "run"), tmp_path / "safe", "--safe_serialization")
    converted(str(tmp_path / "run"), tmp_path / "bin")
    import_weights(tmp_path / file, tmp_path / "ours")
    assert load_strict(run_ranks(load, 2, str(tmp_path / "ours"))[0], state)
    assert load_strict(zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours"), state)


OF_TINY = [path for path in FIXTURES.iterdir() if not path.name.startswith(("pipe_", "moe_"))]  # by tiny.py's model


@pytest.mark.parametrize("case", sorted(path.name for path in OF_TINY if (path / "latest").exists()))
def test_checkpoints_of_deepspeed_have_every_name(case: str, tmp_path: Path) -> None:
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(FIXTURES / case)
    model = tiny.Tiny()
    model.load_state_dict(found, strict=True)
    assert torch.equal(model.head.weight, found["embed.weight"])
    file = zckpt.interchange.import_deepspeed(FIXTURES / case, tmp_path / "ours")
    ours = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path / "ours")
    assert file.exists()
    assert ours.keys() == found.keys()
    assert all(torch.equal(ours[name], found[name]) for name in found)


# -- pipelines -----------------------------------------------------------------------------------


class Pair(nn.Module):
    """A layer with an internal tie, known only on the rank of its stage."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())


def as_head(embed: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x @ embed.weight.t()


def pipeline(num_stages: int) -> PipelineModule:
    torch.manual_seed(4)
    layers = [
        TiedLayerSpec("embed", nn.Embedding, 8, 4),
        LayerSpec(nn.Linear, 4, 4),
        LayerSpec(Pair),
        TiedLayerSpec("embed", nn.Embedding, 8, 4, forward_fn=as_head),
    ]
    return PipelineModule(layers, num_stages, loss_fn=lambda out, _: out.square().mean(), partition_method="uniform")


def train_pipeline(num_stages: int, folder: str) -> None:
    engine = deepspeed.initialize(model=pipeline(num_stages), config={**config(1), "train_batch_size": 4})[0]
    engine.train_batch(iter([(torch.arange(4), torch.zeros(4))]))
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)
    engine.destroy()


@pytest.mark.parametrize("num_stages", [1, 2])
def test_ties_of_all_stages_are_in_what_a_pipeline_exports(num_stages: int, tmp_path: Path) -> None:
    run_ranks(train_pipeline, num_stages, num_stages, str(tmp_path))
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert {"tied.embed.weight", "layers.2.one.weight", "layers.2.two.weight"} <= found.keys()
    for state in (found, torch.load(tmp_path / "pytorch_model.bin", weights_only=True)):
        model = pipeline(1)
        model.load_state_dict(state, strict=True)
        assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())
