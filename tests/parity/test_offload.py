"""Offloaded and speculative optimizer steps give the same bits, with clipping and skipped steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zengine.build.assemble import Client
from zengine.config import Facts, load, resolve
from zengine.initialize import make_engine
from zpartition import Offload, Speculation, Tier

OPTIMIZERS = [
    {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
    {"type": "AdamW", "params": {"lr": 0.02, "state_dtype": "8bit"}},
    {"type": "torch", "params": {}},
]


class Net(nn.Module):
    """Four layers; `loud` makes gradients beyond float16's range."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))

    def forward(self, x: Tensor, loud: bool) -> Tensor:
        y = self.layers(x.to(self.layers[0].weight.dtype)).float()
        return y.square().mean() * (1e9 if loud else 1.0)


def make(offload: Offload, precision: str, optimizer: dict[str, Any], clip: float) -> zengine.Engine:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": clip,
        precision: {"enabled": True},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1700},
    }
    if optimizer["type"] != "torch":
        config["optimizer"] = optimizer
    world = zcomm.init()
    plan = resolve(load(config), Facts(world_size=world.world_size, replicas=world.world_size))
    plan = attrs.evolve(plan, zero=attrs.evolve(plan.zero, offload=offload))
    own = (lambda params: torch.optim.AdamW(params, lr=0.02)) if optimizer["type"] == "torch" else None
    return make_engine(Net(), Client(optimizer=own), plan, world, zcomm.Groups.of(plan.parallel.degrees))


def train(offload: Offload, precision: str, optimizer: dict[str, Any], clip: float) -> tuple[list[Any], list[Tensor]]:
    engine = make(offload, precision, optimizer, clip)
    reports = []
    for micro in range(12):
        generator = torch.Generator().manual_seed(10 * micro + zcomm.group_rank())
        engine.backward(engine(torch.randn(4, 40, generator=generator), loud=micro == 5))
        reports.append(engine.step())
    found = [(r.loss, r.grad_norm, r.applied, r.loss_scale) for r in reports if r is not None]
    weights = [value.clone() for value in engine.state_dict().values()]
    if offload.speculation is not Speculation.OFF:
        ahead = engine.parts.partition.speculative_step
        assert ahead.num_confirmed + ahead.num_rolled_back >= 6
        assert (ahead.num_confirmed > 0) == (clip != 1e-3)
        assert ahead.num_rolled_back > 0
    engine.close()
    return found, weights


def _differing(directory: str, precision: str, clip: float) -> list[str]:
    wrong = []
    for number, optimizer in enumerate(OPTIMIZERS):
        reports, weights = train(Offload(), precision, optimizer, clip)
        assert [applied for _, _, applied, _ in reports].count(False) == (precision == "fp16"), reports
        for offload in (
            Offload(states=Tier.HOST, speculation=Speculation.LAST_BACKWARD),
            Offload(states=Tier.DISK, directory=directory),
        ):
            others, changed = train(offload, precision, optimizer, clip)
            if repr(others) != repr(reports) or not all(map(torch.equal, weights, changed)):
                wrong.append(f"{number} {offload}")
    return wrong


def _shaped(directory: str) -> list[str]:
    wrong = []
    for name in ("Lamb", "Muon", "Adafactor"):
        optimizer = {"type": name, "params": {"lr": 0.01}}
        reports, weights = train(Offload(), "bf16", optimizer, 1e-3)
        others, changed = train(Offload(states=Tier.HOST, ratio=0.5), "bf16", optimizer, 1e-3)
        if repr(others) != repr(reports) or not all(map(torch.equal, weights, changed)):
            wrong.append(name)
        with pytest.raises(ValueError, match="needs all tensors in each step"):
            make(Offload(states=Tier.DISK, directory=directory), "bf16", optimizer, 0.0)
    return wrong


def test_optimizers_that_need_shapes_work_on_the_host_and_are_rejected_on_disk(tmp_path: Path) -> None:
    for wrong in run_ranks(_shaped, 2, str(tmp_path)):
        assert not wrong


@pytest.mark.parametrize(("precision", "clip"), [("fp16", 0.0), ("bf16", 1e-3)])
def test_engines_with_offload_equal_engines_without(precision: str, clip: float, tmp_path: Path) -> None:
    for wrong in run_ranks(_differing, 2, str(tmp_path), precision, clip):
        assert not wrong
