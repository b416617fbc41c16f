"""DeepSpeed's names of a PipelineModule, used as training scripts and its own tests use them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.pipe import LayerSpec, PipelineModule
from zengine.deepspeed.runtime.pipe.topology import PipeDataParallelTopology


def layers() -> list[Any]:
    return [nn.Linear(2, 3), torch.tanh, LayerSpec(nn.Linear, 3, 3), nn.Linear(3, 1)]


def look() -> dict[str, Any]:
    """Return what a rank of two stages sees."""
    topology = PipeDataParallelTopology(num_pp=2, num_dp=1)
    model = PipelineModule(layers(), topology=topology, partition_method="uniform", loss_fn=nn.MSELoss())
    grid = model.mpu()
    return {
        "funcs": [getattr(each, "__name__", type(each).__name__) for each in model.forward_funcs],
        "bounds": (model._local_start, model._local_stop, model.parts, model.partitions()),
        "owners": [model.stage_owner(index) for index in range(model._num_layers)],
        "stage": (model.stage_id, grid.get_stage_id(), model.num_stages, model.num_pipeline_stages()),
        "is_own": model.topology() is topology and grid is model.mpu() and grid.topology() is topology,
        "prefix": model.ckpt_prefix("folder", "step3"),
        "path": model.ckpt_layer_path("folder", 1),
    }


def test_two_stages_know_their_layers_and_ranks() -> None:
    first, last = run_ranks(look, 2)
    assert first["funcs"] == ["Linear", "tanh"]
    assert last["funcs"] == ["Linear", "Linear"]
    assert first["bounds"] == (0, 2, [0, 2, 4], [0, 2, 4])
    assert last["bounds"][:2] == (2, 4)
    assert first["owners"] == last["owners"] == [0, 0, 1, 1]
    assert (first["stage"], last["stage"]) == ((0, 0, 2, 2), (1, 1, 2, 2))
    assert first["is_own"]
    assert last["is_own"]
    assert (first["prefix"], last["prefix"]) == ("folder/step3/module-pipe_00", "folder/step3/module-pipe_01")
    assert (first["path"], last["path"]) == (
        "folder/layer_01-model_states.pt",
        "folder/layer_03-model_states.pt",
    )


def train_save_load(folder: str, stage: int) -> tuple[float, list[str], str]:
    """Return the change of the loss by other weights and the saved ones, the files, and an error without them."""
    torch.manual_seed(0)
    model = PipelineModule(layers(), num_stages=1, loss_fn=nn.MSELoss())
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    grid = model.mpu()
    assert copy.deepcopy(model)._grid is None  # process groups cannot be copied
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.grid is model.mpu() is grid
    batch = [(torch.ones(2, 2), torch.ones(2, 1))]
    before = float(engine.eval_batch(iter(batch)))
    model.save_state_dict(folder, engine.checkpoint_engine)
    torch.distributed.barrier()
    engine.train_batch(iter(batch))
    assert float(engine.eval_batch(iter(batch))) < before
    model.load_state_dir(folder, engine.checkpoint_engine)
    difference = float(engine.eval_batch(iter(batch))) - before
    with pytest.raises(FileNotFoundError) as caught:
        model.load_state_dir(f"{folder}/none", engine.checkpoint_engine)
    engine.close()
    assert model._grid is None  # its groups ended with the engine
    return difference, sorted(path.name for path in Path(folder).iterdir()), str(caught.value)


@pytest.mark.parametrize("stage", [0, 3])
def test_layers_go_to_files_of_their_own_and_back(tmp_path: Path, stage: int) -> None:
    for difference, files, error in run_ranks(train_save_load, 2, str(tmp_path / "layers"), stage):
        assert difference == 0
        assert files == [f"layer_{index:02d}-model_states.pt" for index in (0, 2, 3)]
        assert "layer_00-model_states.pt is missing (there: no file of this layer); engine.load_checkpoint()" in error


def test_runs_of_layers_that_are_recomputed() -> None:
    model = PipelineModule(layers(), num_stages=1, activation_checkpoint_interval=2, checkpointable_layers=["Linear"])
    assert model.checkpointable_layers == ["Linear"]
    assert model.is_checkpointable_results == [False, True]
    model.set_checkpoint_interval(1)
    assert model.activation_checkpoint_interval == model.recompute_interval == 1
    assert model.is_checkpointable_results == [True, False, True, True]
    model.activation_checkpoint_interval = 0
    assert model.is_checkpointable_results == []
    assert not PipelineModule(layers(), num_stages=1)._is_checkpointable([torch.tanh])
    assert model.get_additional_losses() is None
    with pytest.raises(AssertionError, match="layer 4 of 4"):
        model.stage_owner(4)


class GPT2ModelPipe(PipelineModule):
    """A name that DeepSpeed knows: only its transformer layers are recomputed."""


class ParallelTransformerLayerPipe(nn.Linear):
    """A name that DeepSpeed knows."""


def test_of_gpt_models_only_transformer_layers_are_recomputed() -> None:
    specs = [nn.Embedding(3, 2), ParallelTransformerLayerPipe(2, 2)]
    model = GPT2ModelPipe(specs, num_stages=1, activation_checkpoint_interval=1)
    assert model.is_checkpointable_results == [False, True]
    function = deepspeed.checkpointing.non_reentrant_checkpoint
    model = GPT2ModelPipe(specs, num_stages=1, activation_checkpoint_interval=1, activation_checkpoint_func=function)
    assert model.activation_checkpoint_func is function
    assert model.is_checkpointable_results == [True, True]
