"""Sections that are off cost nothing: no hook, collective, feature, tensor or attribute, and equal losses."""

from __future__ import annotations

import gc
from typing import Any

import attrs
import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import recorded, run_ranks

STEPS = 3
QUANTIZED = {"params": {"start_bits": 8, "target_bits": 4}, "modules": ["up"]}
OFF: dict[str, dict[str, Any]] = {
    "diloco": {"diloco": {"sync_every": 0, "fragments": 2}},
    "progressive_layer_drop": {"progressive_layer_drop": {"enabled": False, "theta": 0.5, "gamma": 0.01}},
    "compression_training": {
        "compression_training": {
            "weight_quantization": {"shared_parameters": {"enabled": False}, "different_groups": {"a": QUANTIZED}},
            "activation_quantization": {"shared_parameters": {"enabled": False}},
            "sparse_pruning": {"shared_parameters": {"enabled": False}},
            "row_pruning": {"shared_parameters": {"enabled": False}},
            "head_pruning": {"shared_parameters": {"enabled": False}},
            "channel_pruning": {"shared_parameters": {"enabled": False}},
            "layer_reduction": {"enabled": False},
            "distillation": {"enabled": False},
        }
    },
    "quantize_training": {
        "quantize_training": {"enabled": False, "quantize_bits": {"start_bits": 8, "target_bits": 4}}
    },
    "eigenvalue": {"eigenvalue": {"enabled": False, "layer_name": "blocks", "layer_num": 2}},
    "sparse_attention": {"sparse_attention": {"mode": "fixed", "block": 16}},  # models ask for it: no layer changes
    "elasticity": {"elasticity": {"enabled": False, "max_train_batch_size": 64, "micro_batch_sizes": [2, 4]}},
    "autotuning": {"autotuning": {"enabled": False, "fast": True}},
}
FEATURES = {  # what they would attach
    *("CompressedOptimizer", "LocalRounds", "LayerDrop", "CompressionSchedule", "MixtureOfQuantization"),
    *("Eigenvalues", "Distillation"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@attrs.frozen(kw_only=True)
class Cost:
    """What a run of a few steps has used."""

    losses: list[float]
    collectives: list[tuple[str, int]]  # and bytes
    num_hooks: int  # of modules, parameters, and the optimizer
    features: list[str]
    attributes: list[str]  # of instances of all modules
    ledger: dict[str, int]
    num_tensors: int  # that are alive, beyond those before


def _num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def cost(section: dict[str, Any], stage: int) -> Cost:
    """Train for `STEPS` steps."""
    before = _num_tensors()
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": {"stage": stage},
        **section,
    }
    engine = zengine.initialize(model=Net(), config=config)[0]
    losses = []
    with recorded() as log:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(10 * step + zcomm.group_rank())
            loss = engine(torch.randn(3, 8, generator=generator))
            engine.backward(loss)
            engine.step()
            losses.append(float(loss.detach()))
        del loss
    hooks = [vars(each)[name] for each in engine.modules() for name in sorted(vars(each)) if name.endswith("_hooks")]
    hooks += [getattr(param, "_backward_hooks", None) or {} for param in engine.parameters()]
    hooks += [getattr(param, "_post_accumulate_grad_hooks", None) or {} for param in engine.parameters()]
    found = Cost(
        losses=losses,
        collectives=[(call.op, call.nbytes) for call in log.records],
        num_hooks=sum(map(len, hooks)),
        features=[type(feature).__name__ for feature in engine._features],
        attributes=sorted(f"{type(each).__name__}.{name}" for each in engine.module.modules() for name in vars(each)),
        ledger=dict(engine.parts.partition.ledger()),
        num_tensors=_num_tensors() - before,
    )
    engine.close()
    return found


def _costs(stage: int) -> dict[str, Cost]:
    cost({}, stage)  # what is made once in a process
    gc.collect()
    gc.freeze()  # a million objects that are no engine's, which each count would visit
    try:
        return {"": cost({}, stage), **{name: cost(section, stage) for name, section in OFF.items()}}
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_section_that_is_off_changes_nothing(stage: int) -> None:
    for found in run_ranks(_costs, 2, stage):
        absent = found.pop("")
        assert not FEATURES & set(absent.features)
        assert absent.num_hooks or stage == 0
        for name, each in found.items():
            for field in attrs.fields(Cost):
                assert getattr(each, field.name) == getattr(absent, field.name), f"{name}: {field.name}"


def _with_all_on() -> tuple[list[str], list[str]]:
    on = {
        "progressive_layer_drop": {"enabled": True, "layers": "blocks"},
        "eigenvalue": {"enabled": True, "layer_name": "blocks", "layer_num": 2},
        "diloco": {"sync_every": 2},
    }
    return cost({}, 0).features, cost(on, 0).features


def test_a_section_that_is_on_is_seen() -> None:
    for without, with_them in run_ranks(_with_all_on, 2):
        assert {"LocalRounds", "LayerDrop", "Eigenvalues"} <= set(with_them) - set(without)
