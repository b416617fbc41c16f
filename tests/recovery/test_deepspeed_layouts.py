"""Pipelines, experts and universal checkpoints of DeepSpeed resume with the losses that DeepSpeed had.

As test_deepspeed.py, and with its tolerances: the fixtures of two and four ranks are imported, or loaded as they are,
into one and two ranks, other stages, and other pipeline and expert-parallel degrees.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
import zcomm
import zengine
import zpartition.experts
import zpartition.pipeline
from zckpt.interchange import export_universal, import_deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

FIXTURES = Path(__file__).resolve().parents[2] / "packages/zckpt/tests/fixtures/deepspeed"
sys.path.insert(0, str(FIXTURES))
import tiny  # noqa: E402 - the models and data that the fixtures were made with

TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
UNIVERSAL = {f"universal_{case}" for case in tiny.UNIVERSAL}


def wanted_losses(case: str) -> Any:
    trace = json.loads((FIXTURES / case / "trace.json").read_text())
    return pytest.approx(trace["losses_after"], rel=TOLERANCE[case[-4:]])


def resume_pipeline(folder: str, case: str, stages: int, stage: int) -> list[float]:
    make = tiny.untied_layers if "zero0" in case else tiny.pipeline_layers
    model = zpartition.pipeline.PipelineModule(
        make(zpartition.pipeline), num_stages=stages, loss_fn=tiny.pipeline_loss, partition_method="uniform"
    )
    for param in model.parameters():
        param.data.add_(1.0)  # a value that is not loaded changes the losses
    config = {key: value for key, value in tiny.config_of(case).items() if key != "data_types"}
    config["zero_optimization"] = {"stage": stage}
    engine = zengine.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    engine.load_checkpoint(folder)
    ranks = zcomm.group_size() // stages
    data = iter(tiny.micro_batches(zcomm.group_rank() % ranks, ranks)[tiny.MICRO_BATCHES * tiny.STEPS_BEFORE :])
    losses = [float(engine.train_batch(data)) for _ in range(tiny.STEPS_AFTER)]
    engine.close()
    return losses


def resume_experts(folder: str, case: str, expert_ranks: int, stage: int) -> list[float]:
    model = tiny.TinyExperts(zpartition.experts.MoE, expert_ranks)
    for param in model.parameters():
        param.data.add_(1.0)
    config = {**tiny.config_of(case), "zero_optimization": {"stage": stage}}
    groups = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
    engine = zengine.initialize(model=model, model_parameters=groups, config=config)[0]
    engine.load_checkpoint(folder)
    data, losses = iter(tiny.batches(2 * (tiny.STEPS_BEFORE + tiny.STEPS_AFTER))[2 * tiny.STEPS_BEFORE :]), []
    for first in data:
        whole = torch.cat([first, next(data)])
        engine.backward(engine(whole.chunk(zcomm.group_size())[zcomm.group_rank()]))
        losses.append(engine.step().loss)
    engine.close()
    return losses


def run_all(resume: Any, folder: str, case: str, splits: list[tuple[int, int]]) -> list[list[float]]:
    return [resume(folder, case, *split) for split in splits]


# (pipeline stages, ZeRO stage) by number of ranks
PIPELINE_SPLITS = {1: [(1, 0), (1, 2)], 2: [(2, 1), (1, 3)]}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", list(tiny.PIPELINES))
def test_a_pipeline_resumes_at_another_number_of_stages(tmp_path, case, world_size):
    import_deepspeed(FIXTURES / case, tmp_path)
    for losses in run_ranks(run_all, world_size, resume_pipeline, str(tmp_path), case, PIPELINE_SPLITS[world_size]):
        assert losses == [wanted_losses(case)] * len(PIPELINE_SPLITS[world_size])


# (expert-parallel ranks, ZeRO stage) by number of ranks
EXPERT_SPLITS = {1: [(1, 0), (1, 2)], 2: [(2, 1), (1, 2)]}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", list(tiny.EXPERTS))
def test_experts_resume_at_another_expert_parallel_degree(tmp_path, case, world_size):
    import_deepspeed(FIXTURES / case, tmp_path)
    for losses in run_ranks(run_all, world_size, resume_experts, str(tmp_path), case, EXPERT_SPLITS[world_size]):
        assert losses == [wanted_losses(case)] * len(EXPERT_SPLITS[world_size])


def resume_dense(folder: str, case: str, stage: int) -> tuple[list[float], Any]:
    """As resume() of test_deepspeed.py, from a folder that DeepSpeed's engine could load itself."""
    source, ranks = case.removeprefix("universal_"), zcomm.group_size()
    config = {key: value for key, value in tiny.config(source).items() if key != "data_types"}
    config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 0}
    config["train_micro_batch_size_per_gpu"] = tiny.ROWS * tiny.WORLD_SIZE // ranks
    config["checkpoint"] = {"load_universal": True}
    model = tiny.Tiny()
    for param in model.parameters():
        param.data.add_(1.0)
    engine = zengine.initialize(model=model, model_parameters=tiny.groups(model), config=config)[0]
    _, client_state = engine.load_checkpoint(folder)
    found = (client_state, engine.global_steps, float(engine.parts.scaler.factor))
    rows, losses = tiny.ROWS * tiny.WORLD_SIZE // ranks, []
    for batch in tiny.batches(tiny.STEPS_BEFORE + tiny.STEPS_AFTER)[tiny.STEPS_BEFORE :]:
        engine.backward(engine(batch[zcomm.group_rank() * rows : (zcomm.group_rank() + 1) * rows]))
        losses.append(engine.step().loss)
    engine.close()
    return losses, found


def resume_everything(case: str, folder: str) -> list[Any]:
    """Load each kind of folder as it is, without a conversion."""
    if "pipe" in case:
        return [(resume_pipeline(folder, case.removeprefix("universal_"), zcomm.group_size(), 1), None)]
    if "moe" in case:
        return [(resume_experts(folder, case, zcomm.group_size(), 1), None)]
    return [resume_dense(folder, case, stage) for stage in (0, 3)]


DIRECT = [*sorted(UNIVERSAL), "zero1_bf16", "pipe_zero1_bf16", "moe_zero1_fp32"]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", DIRECT)
def test_the_engine_loads_folders_of_deepspeed_as_they_are(case, world_size):
    for results in run_ranks(resume_everything, world_size, case, str(FIXTURES / case)):
        for losses, found in results:
            assert losses == wanted_losses(case)
            assert found in (None, ({"epoch": 2, "note": "odd sizes"}, 3, 64.0 if case.endswith("fp16") else 1.0))


def test_a_damaged_folder_leaves_the_engine_unchanged(tmp_path):
    """A byte of a moment, a parameter that is gone, masters of another run: the error names the file or key."""
    for change, message in {"flip": "exp_avg.pt", "lose": "body.weight", "mix": "3.up.weight"}.items():
        case = "pipe_zero1_fp32" if change == "mix" else "universal_zero1_bf16"
        run = Path(shutil.copytree(FIXTURES / case, tmp_path / change))
        if change == "flip":
            (path,) = run.glob("*/zero/body.weight/exp_avg.pt")
            data = bytearray(path.read_bytes())
            data[data.index(b"PK\x03\x04", data.index(b"/data/0")) - 20] ^= 16
            path.write_bytes(data)
        elif change == "lose":
            shutil.rmtree(next(run.glob("*/zero/body.weight")))
        else:
            (path,) = run.glob("*/layer_03-model_states.pt")
            layer = torch.load(path, weights_only=True)
            torch.save({**layer, "up.weight": layer["up.weight"] + 1}, path)
        ((name, same),) = run_ranks(_load_damaged, 1, str(run), case)
        assert message in name
        assert same


def _load_damaged(folder: str, case: str) -> tuple[str, bool]:
    if case.startswith("pipe"):
        layers = tiny.pipeline_layers(zpartition.pipeline)
        model: Any = zpartition.pipeline.PipelineModule(layers, num_stages=1, loss_fn=tiny.pipeline_loss)
        engine = zengine.initialize(model=model, config=tiny.config_of(case))[0]
    else:
        model = tiny.Tiny()
        config = {key: value for key, value in tiny.config("zero1_bf16").items() if key != "data_types"}
        engine = zengine.initialize(model=model, model_parameters=tiny.groups(model), config=config)[0]
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(zckpt.CheckpointError) as caught:
        engine.load_checkpoint(folder)
    same = all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())
    steps = engine.global_steps
    engine.close()
    return str(caught.value), same and steps == 0


def test_a_run_of_ours_goes_to_deepspeed_and_comes_back(tmp_path):
    """Steps here, a universal folder, the same losses here again (resume.py of the fixtures tries DeepSpeed)."""
    for losses, again in run_ranks(_there_and_back, 2, str(tmp_path)):
        assert again == pytest.approx(losses, rel=1e-6)


def _there_and_back(folder: str) -> tuple[list[float], list[float]]:
    rank, data = zcomm.group_rank(), tiny.batches(4)

    def start(stage: int) -> Any:
        config = {
            **tiny.config("zero2_bf16"),
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
        }
        model = tiny.Tiny()
        return zengine.initialize(model=model, model_parameters=tiny.groups(model), config=config)[0]

    def train(engine: Any, batches: Any) -> list[float]:
        losses = []
        for batch in batches:
            engine.backward(engine(batch[rank * tiny.ROWS : (rank + 1) * tiny.ROWS]))
            losses.append(engine.step().loss)
        return losses

    engine = start(3)
    train(engine, data[:2])
    engine.save_checkpoint(f"{folder}/ours", client_state={"epoch": 1})
    losses = train(engine, data[2:])
    engine.close()
    if rank == 0:
        export_universal(zckpt.find(f"{folder}/ours"), f"{folder}/back/global_step2_universal")
    zcomm.barrier()
    engine = start(1)
    assert engine.load_checkpoint(f"{folder}/back")[1] == {"epoch": 1}
    again = train(engine, data[2:])
    engine.close()
    return losses, again
