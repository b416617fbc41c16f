"""Checkpoints written by DeepSpeed resume with the losses that DeepSpeed had.

The fixtures are checkpoints of two ranks after three steps (packages/zckpt/tests/fixtures), with DeepSpeed's losses
of the next three.  Each is imported, loaded at several stages on one and two ranks, and trained on.

Tolerances, relative, on the loss of each step: fp32 1e-6 (other kernels and orders of summation; measured: 1e-7); 16
bits 1e-3, since a weight that rounds the other way changes a loss by as much (measured: 3e-4), and DeepSpeed's
buffers are fp32.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zcomm
import zengine
import zpartition
from zckpt.interchange import import_deepspeed, import_weights, read_deepspeed, read_weights
from zckpt.interchange.engine_state import to_json
from zcomm.testing import run_ranks
from zengine.checkpoint.jsonable import encode

FIXTURES = Path(__file__).resolve().parents[2] / "packages/zckpt/tests/fixtures/deepspeed"
sys.path.insert(0, str(FIXTURES))
import tiny  # noqa: E402 - the model and data that the fixtures were made with

TOLERANCE = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-3}
STAGES = {1: (0, 3), 2: (1, 2, 3)}  # world size -> stages that resume


def make(case: str, stage: int, world_size: int) -> Any:
    """Make our engine from the case's config at another stage, with the same global batch."""
    config = {key: value for key, value in tiny.config(case).items() if key != "data_types"}
    config["zero_optimization"] = {"stage": stage, "stage3_unit_size": 50, "stage3_param_persistence_threshold": 0}
    config["train_micro_batch_size_per_gpu"] = tiny.ROWS * tiny.WORLD_SIZE // world_size
    model = tiny.Tiny()
    for param in model.parameters():
        param.data.add_(1.0)  # a value that is not loaded changes the losses
    return zengine.initialize(model=model, model_parameters=tiny.groups(model), config=config)[0]


def resume(root: str, case: str, stage: int) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """Return the next losses, the client state, counters, learning rates and scales."""
    rank, world_size = zcomm.group_rank(), zcomm.group_size()
    engine = make(case, stage, world_size)
    _, client_state = engine.load_checkpoint(root)
    counters = {"steps": engine.global_steps, "samples": engine.global_samples, "lr": engine.get_lr()[0]}
    counters["scale"] = float(engine.parts.scaler.factor)
    count = tiny.config(case).get("gradient_accumulation_steps", 1)
    rows = tiny.ROWS * tiny.WORLD_SIZE // world_size
    losses = []
    for batch in tiny.batches((tiny.STEPS_BEFORE + tiny.STEPS_AFTER) * count)[tiny.STEPS_BEFORE * count :]:
        engine.backward(engine(batch[rank * rows : (rank + 1) * rows]))
        report = engine.step()
        if report is not None:
            losses.append(report.loss)
    counters["scale_after"] = float(engine.parts.scaler.factor)
    engine.close()
    return losses, client_state, counters


def resume_at_every_stage(root: str, case: str) -> list[Any]:
    return [resume(root, case, stage) for stage in STAGES[zcomm.group_size()]]


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("imported")
    for case in tiny.CASES:
        import_deepspeed(FIXTURES / case, root / case)
    return {case: str(root / case) for case in tiny.CASES}


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("case", list(tiny.CASES))
def test_a_deepspeed_run_resumes_with_its_losses_at_any_stage(roots, case, world_size):
    trace = json.loads((FIXTURES / case / "trace.json").read_text())
    count = tiny.config(case).get("gradient_accumulation_steps", 1)
    for results in run_ranks(resume_at_every_stage, world_size, roots[case], case):
        for stage, (losses, client_state, counters) in zip(STAGES[world_size], results):
            wanted = pytest.approx(trace["losses_after"], rel=TOLERANCE[case[-4:]])
            assert losses == wanted, f"stage {stage}"
            assert client_state == {"epoch": 2, "note": "odd sizes"}
            samples = tiny.STEPS_BEFORE * count * tiny.ROWS * tiny.WORLD_SIZE
            rate = 0.05 if "scheduler" not in trace["config"] else 0.02
            assert counters == {
                "steps": tiny.STEPS_BEFORE,
                "samples": samples,
                "lr": pytest.approx(rate),
                "scale": 64.0 if case.endswith("fp16") else 1.0,
                "scale_after": trace["scale_after"],
            }


def test_without_the_optimizer_state_the_losses_would_differ(roots):
    """Check the tolerance: the same weights with fresh moments exceed it at once."""
    trace = json.loads((FIXTURES / "zero3_fp32" / "trace.json").read_text())
    (losses,) = run_ranks(_resume_without_optimizer, 1, roots["zero3_fp32"])
    assert losses[0] == pytest.approx(trace["losses_after"][0], rel=1e-5)
    assert abs(losses[1] - trace["losses_after"][1]) > 0.01


def _resume_without_optimizer(root: str) -> list[float]:
    engine = make("zero3_fp32", 2, 1)
    engine.load_checkpoint(root, load_optimizer_states=False)
    losses = []
    for batch in tiny.batches(6)[3:]:
        engine.backward(engine(batch))
        losses.append(engine.step().loss)
    engine.close()
    return losses


def test_weights_of_every_tied_and_frozen_kind_arrive(roots, caplog):
    """Compare bit by bit with DeepSpeed's model states (of a stage that saves them whole)."""
    with read_deepspeed(FIXTURES / "zero1_fp32") as found:
        module = {name: tensor.clone() for name, tensor in found.files.tp_ranks[0].model["module"].items()}
    engine = make("zero1_fp32", 1, 1)
    engine.load_checkpoint(roots["zero1_fp32"])
    assert "was imported: it has no random states and no position" in caplog.text
    ours = engine.state_dict()
    assert set(ours) == set(module)
    assert all(torch.equal(ours[name], module[name]) for name in module)
    engine.close()


def test_weights_alone_start_a_run(tmp_path):
    """Import `pytorch_model.bin`, and read it row by row into the shards of two ranks."""
    path = FIXTURES / "zero3_bf16" / "pytorch_model.bin"
    import_weights(path, tmp_path / "start")
    for found in run_ranks(_start, 2, str(tmp_path / "start"), str(path)):
        with read_weights(path) as weights:
            assert set(found) == set(weights) - {"gain"}, "saved in halves, a buffer too"
            assert all(torch.equal(found[name], weights[name][...].to(found[name].dtype)) for name in found)


def _start(root: str, path: str) -> dict[str, torch.Tensor]:
    engine = make("zero3_bf16", 3, 2)
    engine.load_checkpoint(root, load_module_only=True)
    loaded = {name: tensor.clone() for name, tensor in engine.state_dict().items() if name != "gain"}
    for shard in engine.parts.partition.shards_to_fill():
        shard.tensor.zero_()
    with read_weights(path) as weights:
        zpartition.load_slices(engine.parts.partition, weights)
    sliced = engine.state_dict()
    assert all(torch.equal(sliced[name], tensor) for name, tensor in loaded.items())
    engine.close()
    return loaded


def test_markers_of_values_equal_those_of_the_engine():
    """Two packages have a table of markers each, because they do not import each other."""
    values = {"a": (1, 2.5, None), "b": {1: [True]}, "c": float("nan"), "d": torch.tensor([3]), "e": {"$tuple": 1}}
    assert to_json(values) == encode(values)
