"""The base feature changes nothing."""

from __future__ import annotations

import copy

import torch
from torch import nn

import zengine
from zengine import Feature


def _train(*features: Feature) -> list[float]:
    torch.manual_seed(0)
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, *_ = zengine.initialize(model=nn.Linear(3, 1), config=config)
    for feature in features:
        engine.add_feature(feature)
    losses = []
    for _ in range(3):
        engine.backward(engine(torch.ones(2, 3)).square().mean())
        losses.append(engine.step().loss)
    return losses


def test_a_feature_that_does_nothing_equals_none_bit_for_bit():
    assert _train(Feature(), Feature()) == _train()


def test_its_state_is_empty_and_loads():
    feature = Feature()
    state = copy.deepcopy(feature.state_dict())
    feature.load_state_dict(state)
    assert state == {}


class Counter(Feature):
    """Counts boundaries, and remembers them."""

    name = "counter"

    def __init__(self) -> None:
        self.count = 0

    def step_end(self, report: zengine.StepReport) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_named_feature_is_saved_and_restored_with_the_run(tmp_path):
    def make() -> tuple[zengine.Engine, Counter]:
        config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine, *_ = zengine.initialize(model=nn.Linear(3, 1), config=config)
        counter = Counter()
        engine.add_feature(counter)
        return engine, counter

    engine, counter = make()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)).mean())
        engine.step()
    engine.save_checkpoint(tmp_path)
    other, restored = make()
    other.load_checkpoint(tmp_path)
    assert (counter.count, restored.count) == (2, 2)
