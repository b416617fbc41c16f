"""`initialize` inside open `Init` blocks: they are suspended, and continue afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
import zpartition
from zcomm.testing import run_ranks
from zengine import deepspeed
from zengine.deepspeed.marks import is_marked


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0} if stage else {"stage": 0},
        **more,
    }


def model(width: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Tanh(), nn.Linear(width, 2))
    nn.init.trunc_normal_(net[0].weight, std=0.5)
    return net


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    with zpartition.gathered(net):
        return {name: param.detach().clone() for name, param in net.named_parameters()}


def is_deferred(net: nn.Module) -> bool:
    with zpartition.suspend_init():
        return zpartition.is_deferred(net)


def same(net: nn.Module, plain: dict[str, torch.Tensor]) -> bool:
    found = weights(net)
    return found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)


LIBRARIES = {
    "zpartition": (zpartition.Init, zengine.initialize),
    "deepspeed": (deepspeed.zero.Init, deepspeed.initialize),
}


def train(engines: list[zengine.DeepSpeedEngine]) -> list[float]:
    """Train each engine for two steps, and close it; return losses."""
    losses = []
    for engine in engines:
        for _ in range(2):
            engine.backward(engine(torch.arange(6.0).view(2, 3)).square().mean())
            losses.append(engine.step().loss)
    return losses


def _program(stage: int, library: str, deferred: bool) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Build and initialize models before, inside, between and after blocks; return losses and weights."""
    init, initialize = LIBRARIES[library]
    engines: list[zengine.DeepSpeedEngine] = []

    def start(net: nn.Module) -> None:
        engines.append(initialize(model=net, config=config(stage))[0])
        assert not is_deferred(net)
        is_at_stage_3 = stage == 3 and library == "deepspeed"
        assert any(map(is_marked, net.parameters())) == is_at_stage_3

    torch.manual_seed(7)
    plain = model(3)
    with init(enabled=deferred):
        outer = model(4)
        start(plain)  # while another model is deferred
        with init(enabled=deferred):
            inner, actor, critic = model(5), model(6), model(7)
            start(outer)
            start(critic)
            with pytest.raises(zengine.ConfigError, match="no_such_key"):
                initialize(model=actor, config={**config(stage), "no_such_key": 1})
            assert is_deferred(inner) == is_deferred(actor) == deferred
            start(actor)
        late = model(8)
        start(inner)  # its block has ended
        assert is_deferred(late) == deferred
    start(late)
    nets = [plain, outer, critic, actor, inner, late]
    start_weights = [weights(net) for net in nets]
    for net in nets:
        assert any(map(is_marked, net.parameters())) == (stage == 3 and library == "deepspeed")
    losses = train(engines)
    found = [*start_weights, *map(weights, nets), {"drawn next": torch.rand(3)}]
    for engine in engines:
        engine.close()
    return losses, found


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("world", [1, 2])
def test_programs_with_nested_open_and_closed_blocks_equal_those_without(
    world: int, stage: int, library: str
) -> None:
    losses, expected = run_ranks(_program, world, stage, library, False)[0]
    assert len(set(losses)) == 12
    for found, parts in run_ranks(_program, world, stage, library, True):
        assert found == losses
        for mine, plain in zip(parts, expected, strict=True):
            assert all(torch.equal(mine[name], plain[name]) for name in plain)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
        assert torch.get_default_dtype() == dtype
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield
        assert torch.empty(1).is_meta


CONTEXTS = {
    "meta": on_meta,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float64": lambda: default_dtype(torch.float64),
}


def trained(stage: int, context: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(7)
    net, given = model(4), config(stage, optimizer={"type": "AdamW"}, scheduler={"type": "WarmupLR"})
    with CONTEXTS.get(context, contextlib.nullcontext)():
        engine = zengine.initialize(model=net, config=given)[0]
    losses, found = train([engine]), weights(net)
    engine.close()
    return losses, found


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("stage", [0, 3])
def test_contexts_of_torch_do_not_disturb_initialize(stage: int, context: str) -> None:
    losses, expected = trained(stage, "")
    found, mine = trained(stage, context)
    assert found == losses
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_make_engine_in_an_open_block() -> None:
    from zengine.build.assemble import Client
    from zengine.config import Facts, load, resolve
    from zengine.initialize import make_engine

    plan = resolve(load(config(2)), Facts(world_size=1, replicas=1))
    world, groups = zcomm.init(), zcomm.Groups.of(zcomm.Degrees())
    torch.manual_seed(7)
    with default_dtype(torch.float64):
        expected = weights(model(4))
    torch.manual_seed(7)
    with zpartition.Init(dtype=torch.float64), torch.device("meta"):
        net = model(4)
        engine = make_engine(net, Client(), plan, world, groups)
        assert is_deferred(model(4))
    assert same(net, expected)
    engine.close()
