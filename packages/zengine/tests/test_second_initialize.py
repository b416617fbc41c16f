"""A second `initialize` of a module whose first engine is closed, destroyed or dropped."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.marks import is_marked


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} if stage else {"stage": 0},
        **more,
    }


class Net(nn.Module):
    """Two layers, and a wide buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale.to(x.dtype))


def weights(net: nn.Module) -> list[torch.Tensor]:
    with zpartition.gathered(net):
        return [param.detach().clone() for param in net.parameters()]


def num_hooks(net: nn.Module) -> int:
    return sum(len(hooks) for module in net.modules() for name, hooks in vars(module).items() if "_hooks" in name)


def train(engine: zengine.DeepSpeedEngine) -> list[float]:
    losses = []
    for _ in range(2):
        x = torch.arange(8.0).view(2, 4).to(engine.module.first.weight.dtype)
        engine.backward(engine(x).float().square().mean())
        losses.append(engine.step().loss)
    return losses


def _again(end: str, stage: int, stage_again: int, more: dict[str, Any]) -> tuple[list[float], list[torch.Tensor]]:
    """Train with one engine and then with another; return the second one's losses, and the weights."""
    torch.manual_seed(3)
    net = Net()
    before, is_dropped = num_hooks(net), end in ("drop", "cycle")
    engine = deepspeed.initialize(model=net, config=config(stage, **more))[0]
    train(engine)
    trained = weights(net)
    if is_dropped:
        with pytest.raises(ValueError, match=r"close\(\) the partition \(or the engine\) .* or drop every reference"):
            zengine.initialize(model=net, config=config(stage, **more))
        assert all(map(torch.equal, weights(net), trained))
        if end == "cycle":
            cycle: list[Any] = [engine]
            cycle.append(cycle)
            del cycle
        del engine
        if end == "drop":
            gc.collect()
            assert num_hooks(net) == before
    elif end != "again":
        getattr(engine, end)()
    first = engine if end == "again" else None
    engine = deepspeed.initialize(model=net, config=config(stage_again, **more))[0]
    assert all(map(torch.equal, weights(net), trained))
    if first is not None:  # deepspeed.initialize has closed it
        with pytest.raises(zengine.CallOrderError, match="the engine is closed"):
            first(torch.zeros(1, 4))
    losses, found = train(engine), weights(net)
    engine.close()
    assert num_hooks(net) == before
    assert not any(map(is_marked, net.parameters()))
    return losses, found


@pytest.mark.parametrize(("stage", "stage_again"), [(0, 0), (0, 3), (1, 2), (3, 3), (3, 0)])
@pytest.mark.parametrize("world", [1, 2])
def test_weights_continue_whatever_ended_the_first_engine(world: int, stage: int, stage_again: int) -> None:
    losses, expected = run_ranks(_again, world, "close", stage, stage_again, {})[0]
    for end in ("destroy", "drop", "cycle", "again"):
        for others, found in run_ranks(_again, world, end, stage, stage_again, {}):
            assert others == losses
            assert all(map(torch.equal, found, expected))


OPTIONS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
    "checkpointed": {"activation_checkpointing": {"number_checkpoints": 2}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_changes_of_the_module_end_with_a_dropped_engine(option: str) -> None:
    losses, expected = run_ranks(_again, 2, "close", 3, 3, OPTIONS[option])[0]
    for others, found in run_ranks(_again, 2, "drop", 3, 3, OPTIONS[option]):
        assert others == losses
        assert all(map(torch.equal, found, expected))


def _in_an_open_block() -> None:
    torch.manual_seed(3)
    with deepspeed.zero.Init():
        net = Net()
        for end in ("close", "drop", "cycle"):
            engine = deepspeed.initialize(model=net, config=config(3))[0]
            found = weights(net)
            if end == "close":
                expected = found
                engine.close()
            del engine
        assert Net().first.weight.device.type == "meta"
    assert all(map(torch.equal, found, expected))


def test_in_an_open_block_of_init() -> None:
    run_ranks(_in_an_open_block, 2)
