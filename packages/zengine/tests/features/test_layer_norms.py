"""Gradient norms by layer, equal for every partitioning."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.features.measuring import LayerNorms, layer_of
from zpartition.pipeline import LayerSpec, PipelineModule


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        ("transformer.h.3.attn.0.weight", "transformer.h.3"),
        ("embedding.weight", "embedding"),
        ("final_norm.bias", "final_norm"),
        ("scale", "scale"),
        ("0.weight", "0"),
    ],
)
def test_a_layer_is_the_path_to_its_number_or_the_module(name, layer):
    assert layer_of(name) == layer


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(40, 40) for _ in range(2))
        self.head = nn.Linear(40, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x).square().mean()


def batch(rank):
    return torch.linspace(-1, 1, 80).view(2, 40) * (rank + 1)


def norms_at(folder):
    """On each rank: for every stage and loss scale the norms by layer at each step, and the report's norm."""
    found = []
    for stage, fp16 in ((0, False), (1, False), (2, True), (3, False), (3, True)):
        engine, *_ = zengine.initialize(
            model=Blocks(),
            config={
                "train_micro_batch_size_per_gpu": 2, "fp16": {"enabled": fp16, "initial_scale_power": 8},
                "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
                "optimizer": {"type": "SGD", "params": {"lr": 0.0}},
                "tensorboard": {
                    "enabled": True, "output_path": folder, "job_name": f"{stage}{fp16}", "gradient_histograms": 2,
                },
            },
        )  # fmt: skip
        seen = []
        telemetry = engine.parts.telemetry
        if zcomm.group_rank() == 0:
            write = telemetry.sinks.write
            telemetry.sinks.write = lambda snapshot, write=write, seen=seen: (seen.append(snapshot), write(snapshot))
        for _ in range(3):
            data = batch(zcomm.group_rank())
            engine.backward(engine(data.half() if fp16 else data))
            report = engine.step()
        found.append(([dict(snapshot.layer_norms) for snapshot in seen], report.grad_norm))
        engine.close()
    return found


def oracle():
    model = Blocks()
    (sum(model(batch(rank)) for rank in range(2)) / 2).backward()
    layers = {"blocks.0": model.blocks[0], "blocks.1": model.blocks[1], "head": model.head}
    return {
        name: math.hypot(*(float(param.grad.norm()) for param in layer.parameters()))
        for name, layer in layers.items()
    }


def test_every_stage_and_dtype_charts_the_norms_of_one_process(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (found, _) = run_ranks(norms_at, 2, str(tmp_path))
    wanted = oracle()
    for (first, second, third), whole in found:
        assert first == third == {}
        assert second == pytest.approx(wanted, rel=5e-3)
        assert math.hypot(*second.values()) == pytest.approx(whole, rel=1e-6)
    assert found[0][0][1] == pytest.approx(wanted, rel=1e-5)
    events = EventAccumulator(str(tmp_path / "3False"))
    events.Reload()
    (histogram,) = events.Histograms("7 gradients/norm_by_layer")
    assert histogram.step == 2
    assert histogram.histogram_value.num == 3
    assert histogram.histogram_value.max == pytest.approx(max(wanted.values()), rel=1e-5)


def norms_of_stages(num_stages, stage):
    """Norms by layer at the second step, and the report's norm, of the same layers in so many stages."""
    torch.manual_seed(0)
    layers = [*(LayerSpec(nn.Linear, 8, 8), torch.tanh) * 3, LayerSpec(nn.Linear, 8, 1)]
    model = PipelineModule(layers, num_stages=num_stages, loss_fn=nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2 * num_stages // zcomm.group_size(),
        "zero_optimization": {"stage": stage}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }  # fmt: skip
    engine, *_ = zengine.initialize(model=model, config=config)
    feature = LayerNorms(every=2)
    engine.add_feature(feature)
    found = []
    feature.telemetry = SimpleNamespace(layers=found.append)
    replica = engine.parts.groups.get_data_parallel_rank()
    for step in range(2):
        pairs = [(torch.full((2, 8), 1.0 + index + step), torch.ones(2, 1)) for index in range(2)]
        engine.train_batch(iter(pairs[replica:] if len(pairs) > engine.micro_batches else pairs))
    norm = engine.last_report.grad_norm
    engine.close()
    return found, norm


def test_a_pipeline_has_the_norms_of_all_stages_on_every_rank():
    (expected,), norm = run_ranks(norms_of_stages, 1, 1, 0)[0]
    assert list(expected) == ["layers.0", "layers.2", "layers.4", "layers.6"]
    for world, num_stages, stage in ((2, 2, 0), (4, 2, 3), (4, 4, 1)):
        for (found,), its_norm in run_ranks(norms_of_stages, world, num_stages, stage):
            assert list(found) == list(expected)
            assert found == pytest.approx(expected, rel=1e-5)
            assert math.hypot(*found.values()) == pytest.approx(its_norm, rel=1e-5)
            assert its_norm == pytest.approx(norm, rel=1e-5)
