"""Compiled blocks compute the same, keep names and hooks, and are gone after close."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zengine
from zengine.compiling import blocks_of


class Net(nn.Module):
    """Two equal blocks and a tail."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.tail = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(x).square().mean()


def make(stage: int) -> zengine.Engine:
    config = {
        "train_batch_size": 2,
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    return zengine.initialize(model=Net(), config=config)[0]


def losses(engine: zengine.Engine) -> list[float]:
    found = []
    for index in range(3):
        engine.backward(engine(torch.full((2, 3), 1.0 + index)))
        found.append(engine.step().loss)
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_compiled_blocks_train_to_the_same_losses(stage):
    engine, plain = make(stage), make(stage)
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    names = list(engine.state_dict())
    assert not engine.is_compiled
    engine.compile(backend=backend, compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert losses(engine) == pytest.approx(losses(plain))
    assert graphs
    assert list(engine.state_dict()) == names
    with pytest.raises(ValueError, match="compiled already"):
        engine.compile()
    engine.close()
    assert not any("forward" in vars(module) for module in engine.module.modules())


def test_hooks_run_around_the_graph_and_an_own_forward_comes_back():
    engine = make(0)
    block, seen = engine.module.blocks[0], []
    block.register_forward_hook(lambda *_: seen.append("hook"))
    own = block.forward
    block.forward = own
    engine.compile(backend="eager")
    losses(engine)
    assert seen == ["hook"] * 3
    engine.close()
    assert vars(block)["forward"] is own


def test_what_belongs_to_another_compiler_is_refused():
    engine = make(0)
    with pytest.raises(ValueError, match=r"schedule=.*DeepCompile"):
        engine.compile(schedule=[(0, [])])
    with pytest.raises(ValueError, match=r"compiled_autograd_enabled=.*DeepCompile"):
        engine.compile(compiled_autograd_enabled=True)


def test_blocks_are_the_members_of_the_outermost_lists_or_the_module():
    net = Net()
    assert blocks_of(net) == list(net.blocks)
    assert blocks_of(net.tail) == [net.tail]
    assert blocks_of(nn.Sequential(net)) == list(net.blocks)
