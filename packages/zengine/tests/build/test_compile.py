"""Compiled blocks compute the same, keep names and hooks, and are removed by close."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import end_ranks, run_ranks
from zengine.build.compile import blocks_of
from zengine.build.pipeline import check_pipeline
from zengine.config import Facts, load, resolve
from zpartition.pipeline import LayerSpec, PipelineModule
from zpartition.tensor import Column, Row, Rule, TensorPlan, parallelize
from zpartition.testing import expert_models as experts


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


def recording(graphs: list[int]) -> Callable[..., Callable[..., Any]]:
    """Return a backend that notes the size of each graph and runs it as it is."""

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(len(list(graph.graph.nodes)))
        return graph.forward

    return backend


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
    names = list(engine.state_dict())
    assert not engine.is_compiled
    engine.compile(backend=recording(graphs), compile_kwargs={"dynamic": False})
    assert engine.is_compiled
    assert losses(engine) == pytest.approx(losses(plain))
    assert graphs
    assert list(engine.state_dict()) == names
    with pytest.raises(ValueError, match="compiled already"):
        engine.compile()
    engine.close()
    assert not any("forward" in vars(module) for module in engine.module.modules())


class DeepNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(12))


def test_layers_that_are_skipped_at_times_share_their_graphs():
    graphs: list[int] = []
    config = {
        "train_batch_size": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "progressive_layer_drop": {"enabled": True, "theta": 0.2, "gamma": 1.0, "layers": "blocks"},
    }
    engine, plain = (zengine.initialize(model=DeepNet(), config=config)[0] for _ in range(2))
    engine.compile(backend=recording(graphs))
    for _ in range(5):
        assert losses(engine) == pytest.approx(losses(plain))
    assert 1 <= len(graphs) <= 2  # the first block's input needs no gradient
    engine.close()
    assert not any("forward" in vars(module) for module in engine.module.modules())
    plain.close()


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


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def config(**more: Any) -> dict[str, Any]:
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    return {"train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0, "optimizer": optimizer, **more}


def in_stages(compiles: bool, stage: int, graphs: list[list[str]]) -> list[float]:
    torch.manual_seed(0)
    model = PipelineModule([LayerSpec(Block) for _ in range(4)], num_stages=2, loss_fn=nn.functional.mse_loss)
    given = config(gradient_accumulation_steps=2, zero_optimization={"stage": stage})
    with zengine.initialize(model=model, config=given)[0] as engine:
        if compiles:
            engine.compile(backend=noting(graphs))
        batch = (torch.ones(2, 4), torch.zeros(2, 4))
        found = [engine.train_batch(iter([batch, batch])).item() for _ in range(3)]
    assert not any("forward" in vars(module) for module in model.modules())
    return found


def split(compiles: bool, stage: int, graphs: list[list[str]]) -> list[float]:
    given = config(zero_optimization={"stage": stage})
    model, found = Tower(), []
    parallelize(model, TensorPlan([Rule("blocks.*.up", Column()), Rule("blocks.*.down", Row())]))
    with zengine.initialize(model=model, config=given)[0] as engine:
        assert engine.parts.partition.mp_group.size == 2
        if compiles:
            engine.compile(backend=noting(graphs))
        for index in range(3):
            engine.backward(engine(torch.full((2, 4), 1.0 + index)))
            found.append(engine.step().loss)
    assert not any("forward" in vars(module) for module in model.modules())
    return found


def dealt(compiles: bool, stage: int, graphs: list[list[str]]) -> list[float]:
    given = config(zero_optimization={"stage": stage}, expert_parallel={"enabled": True, "autoep_size": 2})
    with zengine.initialize(model=experts.MoELanguageModel(), config=given)[0] as engine:
        if compiles:
            engine.compile(backend=noting(graphs))
        found = []
        for index in range(3):
            engine.backward(engine(experts.batches(2, 3)[index, 0, zcomm.group_rank()]))
            found.append(engine.step().loss)
    return found


def noting(graphs: list[list[str]]) -> Callable[..., Any]:
    """A backend that runs what it is given, and notes which operations those are."""

    def backend(graph: torch.fx.GraphModule, _inputs: list[torch.Tensor]) -> object:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    return backend


def cut_and_compiled() -> list[tuple[list[float], list[float], str]]:
    found = []
    for train, stage in ((in_stages, 3), (split, 0), (dealt, 3)):
        graphs: list[list[str]] = []
        plain = train(False, stage, graphs)
        assert graphs == []
        found.append((plain, train(True, stage, graphs), str(graphs)))
    return found


def test_what_is_split_compiles_to_what_it_was() -> None:
    for rank in run_ranks(cut_and_compiled, 2):
        for number, (plain, compiled, graphs) in enumerate(rank):
            assert compiled == plain
            assert ("layer_norm" if number == 2 else "tanh") in graphs
            assert ("linear" in graphs) == (number == 0)  # a split layer is in no graph, nor are a router and experts
    end_ranks()


def compiled_before(schedule: str) -> tuple[list[float], bool]:
    torch.manual_seed(0)
    layers = [LayerSpec(Block), torch.sigmoid, LayerSpec(Block), LayerSpec(Block)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.functional.mse_loss)
    graphs: list[list[str]] = []
    if schedule:
        model.compile(backend=noting(graphs))
    given = config(gradient_accumulation_steps=2, zero_optimization={"stage": 3})
    with zengine.initialize(model=model, config={**given, "pipeline": {"schedule": schedule or "1f1b"}})[0] as engine:
        batch = (torch.ones(2, 4), torch.zeros(2, 4))
        found = [engine.train_batch(iter([batch, batch])).item() for _ in range(3)]
        if schedule:
            with pytest.raises(ValueError, match="compiled already"):
                engine.compile()
    return found, "tanh" in str(graphs)


def compiled_before_and_not() -> None:
    plain, compiled = compiled_before(""), compiled_before("1f1b")
    assert (plain[0], plain[1], compiled[1]) == (compiled[0], False, True)
    with pytest.raises(zengine.ConfigError, match=r"a compiled layer has one backward"):
        compiled_before("zero_bubble")


def test_a_pipeline_module_compiles_its_layers_before_an_engine_has_it() -> None:
    run_ranks(compiled_before_and_not, 2)
    end_ranks()


def test_a_compiled_pipeline_module_is_not_split_over_tensor_ranks() -> None:
    model = PipelineModule([LayerSpec(Block) for _ in range(2)], num_stages=1, loss_fn=nn.functional.mse_loss)
    model.compile(backend="eager")
    plan = resolve(load(config(tensor_parallel={"autotp_size": 2})), Facts(world_size=2, replicas=2))
    with pytest.raises(zengine.ConfigError, match=r"Call engine\.compile\(\) instead"):
        check_pipeline(model, plan)


def refused() -> str:
    model = PipelineModule([LayerSpec(Block) for _ in range(2)], num_stages=2, loss_fn=nn.functional.mse_loss)
    given = config(gradient_accumulation_steps=2, pipeline={"schedule": "zero_bubble"})
    with zengine.initialize(model=model, config=given)[0] as engine, pytest.raises(ValueError) as caught:
        engine.compile()
    return str(caught.value)


def test_a_backward_in_halves_is_not_compiled() -> None:
    for text in run_ranks(refused, 2):
        assert text.startswith('compile() with the schedule "zero_bubble"')
        assert '"1f1b"' in text
