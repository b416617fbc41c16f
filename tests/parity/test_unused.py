"""Unused parameters: every parameter counts its own updates, as in plain torch.

The oracle is a plain loop over the whole batch, in which the gradient of an unused parameter is None.  A wrong count
changes Adam's bias correction of a branch that is first used in step 6 by a factor of two or more.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zoptim
from zcomm.testing import run_ranks

WIDTH, BATCH, NUM_STEPS = 24, 12, 12
STRICT = {"stage3_unit_size": 400, "stage3_param_persistence_threshold": 0, "stage3_max_live_parameters": 0}
# Branches used in each step: one from a later step on, one in some steps, one never.
USED = [(0, 3)] + [(0,)] * 2 + [(0, 3)] * 2 + [(0,), (0, 1), (0, 1, 3), (1,), (0, 1), (1, 3), (0, 1, 3)]
Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "torch.AdamW": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1),
    "torch.AdamW, fused": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "torch.AdamW, foreach": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True),
    "torch.Adam, amsgrad": functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "torch.RAdam": functools.partial(torch.optim.RAdam, lr=2e-2),
    "torch.NAdam": functools.partial(torch.optim.NAdam, lr=1e-2),
    "torch.Adamax": functools.partial(torch.optim.Adamax, lr=1e-2),
    "torch.Adadelta": functools.partial(torch.optim.Adadelta, lr=0.5),
    "torch.Adagrad": functools.partial(torch.optim.Adagrad, lr=2e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "torch.ASGD": functools.partial(torch.optim.ASGD, lr=2e-2, t0=3),
    "torch.Rprop": functools.partial(torch.optim.Rprop, lr=1e-3),
    "torch.RMSprop": functools.partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "torch.SGD": functools.partial(torch.optim.SGD, lr=5e-2, momentum=0.9, dampening=0.5, weight_decay=0.1),
    "zoptim.AdamW": functools.partial(zoptim.AdamW, lr=1e-2, weight_decay=0.1),
    "zoptim.Adam, in torch": functools.partial(zoptim.Adam, lr=1e-2, foreach=True),
    "zoptim.Adagrad": functools.partial(zoptim.Adagrad, lr=2e-2, lr_decay=0.1),
    "zoptim.SGD": functools.partial(zoptim.SGD, lr=5e-2, momentum=0.9, dampening=0.5),
    "zoptim.Lion": functools.partial(zoptim.Lion, lr=1e-3, weight_decay=0.1),
    "zoptim.Muon": functools.partial(zoptim.Muon, lr=1e-2, adam_lr=1e-2),
    "zoptim.LAMB": functools.partial(zoptim.LAMB, lr=1e-2, weight_decay=0.1),
    "zoptim.Adafactor": functools.partial(zoptim.Adafactor, lr=1e-2),
}


class Branches(nn.Module):
    """Four branches between an embedding and a head; each step uses some of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(13, WIDTH)
        self.branches = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.head = nn.Linear(WIDTH, 13)

    def forward(self, batch: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        hidden = self.embed(batch[:, 0])
        for index in used:
            hidden = hidden + self.branches[index](hidden)
        return nn.functional.cross_entropy(self.head(hidden), batch[:, 1])


def batches() -> torch.Tensor:
    """Tokens and targets (step, sample, 2)."""
    tokens = torch.randint(0, 13, (NUM_STEPS, BATCH), generator=torch.Generator().manual_seed(11))
    return torch.stack((tokens, (3 * tokens + 1) % 13), dim=-1)


def used_by(step: int, rank: int, differ: bool) -> tuple[int, ...]:
    """Return the branches of a step.  If ranks differ, rank 0 skips branch 3, which still counts as used."""
    return tuple(index for index in USED[step] if index != 3 or rank == 1 or not differ)


def alone(make: Make, num_ranks: int, accumulation: int, differ: bool) -> dict[str, torch.Tensor]:
    """Return the weights after all steps of plain torch."""
    model = Branches()
    optimizer = make(list(model.named_parameters()))
    for step, data in enumerate(batches()):
        parts = data.chunk(num_ranks * accumulation)
        for index, part in enumerate(parts):
            (model(part, used_by(step, index % num_ranks, differ)) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def engine_of(stage: int, accumulation: int, optimizer: Any, **zero: Any) -> zengine.Engine:
    """Make an engine.  optimizer: a section of the config, or a factory."""
    model = Branches()
    is_config = isinstance(optimizer, dict)
    config = {
        "train_micro_batch_size_per_gpu": BATCH // accumulation // zcomm.group_size(),
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1500, **STRICT, **zero},
        **({"optimizer": optimizer} if is_config else {}),
    }
    made = None if is_config else optimizer(list(model.named_parameters()))
    return zengine.initialize(model=model, optimizer=made, config=config)[0]


def train(engine: zengine.Engine, accumulation: int, steps: range, differ: bool = False) -> None:
    num_ranks, rank = zcomm.group_size(), zcomm.group_rank()
    for step in steps:
        for part in batches()[step].chunk(num_ranks * accumulation)[rank::num_ranks]:
            engine.backward(engine(part, used_by(step, rank, differ)))
            engine.step()


def difference(engine: zengine.Engine, expected: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of any weight."""
    found = engine.state_dict()
    return max(float((found[name] - value).abs().max()) for name, value in expected.items())


Weights = dict[str, torch.Tensor]


def all_stages(name: str, accumulation: int, expected: tuple[Weights, Weights]) -> list[float]:
    """Return the distance of each stage from plain torch, for equal and for different use on the ranks."""
    found = []
    for stage in range(4):
        differ = zcomm.group_size() > 1 and stage < 3
        engine = engine_of(stage, accumulation, OPTIMIZERS[name])
        train(engine, accumulation, range(NUM_STEPS), differ)
        found.append(difference(engine, expected[differ]))
        engine.close()
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_unused_parameters_count_their_own_updates_at_every_stage(name: str, world_size: int) -> None:
    for accumulation in (1, 3) if name in ("torch.AdamW", "zoptim.AdamW") else (1,):
        expected = tuple(alone(OPTIMIZERS[name], world_size, accumulation, differ) for differ in (False, True))
        for found in run_ranks(all_stages, world_size, name, accumulation, expected):
            assert max(found) < 2e-6, (accumulation, found)


FORMATS = {
    "bf16": functools.partial(zoptim.AdamW, lr=1e-2, state_dtype="bf16"),
    "8bit": functools.partial(zoptim.AdamW, lr=1e-2, state_dtype="8bit"),
    "8bit, torch": functools.partial(zoptim.AdamW, lr=1e-2, state_dtype="8bit", foreach=True),
}


def weights_of_stages(name: str) -> list[Weights]:
    found = []
    for stage in range(4):
        engine = engine_of(stage, 1, FORMATS[name])
        train(engine, 1, range(NUM_STEPS))
        found.append({key: value.clone() for key, value in engine.state_dict().items()})
        engine.close()
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_quantized_state_of_unused_parameters_counts_as_on_whole_tensors(name: str) -> None:
    """A block of codes belongs to one parameter, wherever shards cut it."""
    expected = alone(FORMATS[name], 1, 1, False)
    for found in run_ranks(weights_of_stages, 1, name)[0]:
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=0, atol=2e-6)
    for by_stage in run_ranks(weights_of_stages, 2, name):
        for found, key in itertools.product(by_stage, expected):
            assert torch.equal(found[key], by_stage[0][key])


ADAMW = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
SAVERS: dict[str, Any] = {"torch": OPTIMIZERS["torch.AdamW"], "zoptim": ADAMW}
BEFORE = 9  # steps before a save; branch 1 has had 2 updates then, branch 3 five, branch 2 none


def save_all(root: str) -> None:
    for stage, (name, optimizer) in itertools.product(range(4), SAVERS.items()):
        engine = engine_of(stage, 1, optimizer)
        train(engine, 1, range(BEFORE))
        engine.save_checkpoint(root, f"{name}-{zcomm.group_size()}-{stage}")
        engine.close()


def resume_all(root: str, stage: int, tags: list[str], expected: Weights) -> dict[str, float]:
    """Return the tags whose resumed run differs from plain torch at this stage, with the difference."""
    found: dict[str, float] = {}
    for tag in tags:
        engine = engine_of(stage, 1, SAVERS[tag.split("-")[0]])
        engine.load_checkpoint(root, tag)
        train(engine, 1, range(BEFORE, NUM_STEPS))
        found[tag] = difference(engine, expected)
        engine.close()
    return {tag: value for tag, value in found.items() if not value < 2e-6}


def test_counts_that_differ_are_saved_and_loaded_at_any_stage_and_world(tmp_path: Path) -> None:
    expected = alone(OPTIMIZERS["torch.AdamW"], 1, 1, False)
    for world_size in (1, 2):
        run_ranks(save_all, world_size, str(tmp_path))
    tags = [f"{name}-{world_size}-{stage}" for name in SAVERS for world_size in (1, 2) for stage in range(4)]
    for world_size, stage in itertools.product((1, 2), range(4)):
        assert run_ranks(resume_all, world_size, str(tmp_path), stage, tags, expected) == [{}] * world_size


def through_state_dict(stage: int, optimizer: Any, expected: Weights) -> float:
    """Move the state through the optimizer's state dict."""
    first = engine_of(stage, 1, optimizer)
    train(first, 1, range(BEFORE))
    weights, state = first.state_dict(), first.optimizer.state_dict()
    first.close()
    second = engine_of(stage, 1, optimizer)
    second.load_state_dict(weights)
    second.optimizer.load_state_dict(state)
    train(second, 1, range(BEFORE, NUM_STEPS))
    found = difference(second, expected)
    second.close()
    return found


@pytest.mark.parametrize(
    "name", ["torch.AdamW", "torch.NAdam", "torch.SGD", "zoptim.AdamW", "zoptim.SGD", "zoptim.Adafactor"]
)
def test_counts_that_differ_are_part_of_the_state_dict(name: str) -> None:
    expected = alone(OPTIMIZERS[name], 1, 1, False)
    for stage in (0, 2):
        assert max(run_ranks(through_state_dict, 2, stage, OPTIMIZERS[name], expected)) < 2e-6
