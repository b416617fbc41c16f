"""Patterns of client code for stage 3: saving, averaging, adapters, generation.

Each reads the attributes that DeepSpeed sets on parameters (`ds_id`, `ds_status`, ...).  The results are compared
with the masters, bit for bit in float32, on one rank and on two, with all weights sharded and with small weights
whole.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from zengine.deepspeed.utils import safe_get_full_fp32_param

State = dict[str, torch.Tensor]
CASES = pytest.mark.parametrize(
    ("world", "persist", "half"), [(1, 0, False), (2, 0, False), (2, 1000, False), (1, 0, True), (2, 0, True)]
)


class Actor(nn.Module):
    """A frozen base layer, a trained adapter, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.base = nn.Linear(6, 12)
        self.lora_a, self.lora_b = nn.Linear(6, 2, bias=False), nn.Linear(2, 12, bias=False)
        self.head = nn.Linear(12, 3)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.base(x) + self.lora_b(self.lora_a(x))).tanh())


def config(persist: int, half: bool) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05}},
        "bf16": {"enabled": half},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": persist, "stage3_unit_size": 1},
    }


def trained(persist: int, half: bool, *, inside_init: bool = False) -> Any:
    with deepspeed.zero.Init(enabled=inside_init):
        model = Actor()
    engine = deepspeed.initialize(model=model, config=config(persist, half))[0]
    for number in range(2):
        x = torch.randn(2, 6, generator=torch.Generator().manual_seed(number + 10 * zcomm.group_rank()))
        engine.backward(engine(x.to(torch.bfloat16 if half else torch.float32)).float().square().mean())
        engine.step()
    return engine


def truth(engine: Any) -> State:
    """Return the masters by module name, and frozen weights as a plain build has them."""
    plain = dict(Actor().named_parameters())
    return {
        name: (safe_get_full_fp32_param(param) if param.requires_grad else plain[name].detach()).to(param.dtype)
        for name, param in engine.module.named_parameters()
    }


def same(found: State, expected: State) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# -- a chat trainer: whole weights to rank 0, and an average beside the actor --------------------


def resting(params: Iterable[Any]) -> list[Any]:
    return [each for each in params if hasattr(each, "ds_id") and each.ds_status == ZeroParamStatus.NOT_AVAILABLE]


def collected(module: nn.Module) -> State:
    """Gather one parameter after the other, without a copy if it is on the CPU."""
    found = {}
    for name, param in module.named_parameters():
        if hasattr(param, "ds_id"):
            with deepspeed.zero.GatheredParameters(resting([param])):
                found[name] = param.data.cpu()
        else:
            found[name] = param.data.cpu()
    return found


def average(model: nn.Module, kept: nn.Module, beta: float) -> None:
    with torch.no_grad():
        for param, mean in zip(model.parameters(), kept.parameters(), strict=True):
            wanted = resting([param, mean])
            with deepspeed.zero.GatheredParameters(wanted, enabled=bool(wanted)):
                mean.data.copy_(torch.lerp(param.data, mean.data, beta))


def check_chat(persist: int, half: bool) -> None:
    engine = trained(persist, half)
    expected = truth(engine)
    found = collected(engine.module)
    assert same(found, expected)
    assert same(collected(engine.module), expected)  # collected weights share no memory with later ones
    assert same(found, expected)
    kept = deepspeed.initialize(model=Actor(), config=config(persist, half))[0]
    means = truth(kept)
    for _ in range(3):
        average(engine, kept.module, 0.75)
        means = {name: torch.lerp(expected[name], means[name], 0.75) for name in means}
        assert same(collected(kept.module), means)
    for each, weights in ((kept, means), (engine, expected)):
        assert same(truth(each), weights)
        assert same(each.module_state_dict(), weights)
        each.destroy()


@CASES
def test_a_chat_trainer_saves_and_averages(world: int, persist: int, half: bool) -> None:
    run_ranks(check_chat, world, persist, half)


# -- scripts that tune adapters ------------------------------------------------------------------


def maybe_whole(param: Any, *, insists: bool) -> torch.Tensor:
    if hasattr(param, "ds_id"):
        if insists:
            assert param.ds_status == ZeroParamStatus.NOT_AVAILABLE
        with deepspeed.zero.GatheredParameters([param]):
            return param.data.detach().cpu().clone()
    return param.detach().cpu().clone()


def check_adapters(persist: int, half: bool) -> None:
    engine = trained(persist, half, inside_init=True)
    expected = truth(engine)
    for insists in (True, False):
        lora = {n: maybe_whole(p, insists=insists) for n, p in engine.module.named_parameters() if "lora_" in n}
        rest = {n: maybe_whole(p, insists=insists) for n, p in engine.module.named_parameters() if "lora_" not in n}
        assert same({**rest, **lora}, {name: expected[name] for name in [*rest, *lora]})
    assert all(hasattr(param, "ds_id") for param in engine.module.parameters())
    total = sum(p.ds_numel if hasattr(p, "ds_numel") else p.numel() for p in engine.module.parameters())
    assert total == sum(tensor.numel() for tensor in expected.values())
    engine.close()
    found = {name: maybe_whole(param, insists=True) for name, param in engine.module.named_parameters()}
    assert same(found, expected)  # without marks: whole again, in separate memory


@CASES
def test_scripts_gather_single_parameters_if_needed(world: int, persist: int, half: bool) -> None:
    run_ranks(check_adapters, world, persist, half)


def check_unfinished() -> None:
    """Evaluation leaves no gathered unit, prefetched or late, that a save mistakes for whole."""
    engine = trained(0, False)
    expected = truth(engine)
    for _ in range(3):
        with torch.no_grad():
            engine(torch.ones(2, 6))
        assert same({n: maybe_whole(p, insists=True) for n, p in engine.module.named_parameters()}, expected)
    engine(torch.ones(2, 6))  # a forward before its backward
    assert same(collected(engine.module), expected)
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_a_save_after_an_evaluation_is_whole(world: int) -> None:
    run_ranks(check_unfinished, world)


# -- generation with whole weights, hooks removed meanwhile --------------------------


def every_parameter(module: Any, recurse: bool) -> Iterator[Any]:
    return itertools.chain(module.named_parameters(recurse=recurse), module.ds_external_parameters())


@contextlib.contextmanager
def unwrapped(engine: Any) -> Iterator[nn.Module]:
    offload = (
        engine.optimizer.parameter_offload if hasattr(engine.optimizer, "parameter_offload") else engine.optimizer
    )
    with deepspeed.zero.GatheredParameters(engine.parameters()):
        for _, param in every_parameter(offload.module, True):
            param.ds_active_sub_modules.clear()
        for hook in (*offload.forward_hooks, *offload.backward_hooks):
            hook.remove()
        offload.forward_hooks, offload.backward_hooks = [], []
        yield engine.module
        offload._register_deepspeed_module(offload.module)


def check_generation(persist: int, half: bool) -> None:
    engine = trained(persist, half)
    expected = truth(engine)
    x = torch.ones(2, 6, dtype=expected["base.weight"].dtype)
    plain = Actor().to(x.dtype)
    plain.load_state_dict(expected)
    with unwrapped(engine) as module, torch.no_grad():
        for times in range(1 + zcomm.group_rank(), 3):  # ranks generate different numbers of tokens
            torch.testing.assert_close(module(x * times), plain(x * times))
        assert same(dict(module.state_dict()), expected)
    assert same(truth(engine), expected)
    engine.backward(engine(x).float().square().mean())
    assert engine.step()
    engine.destroy()


@CASES
def test_generation_with_all_weights_whole(world: int, persist: int, half: bool) -> None:
    run_ranks(check_generation, world, persist, half)


# -- adapters initialized from sharded weights -----------------------------------------------


@contextlib.contextmanager
def gathered_for_adapters(params: Any) -> Iterator[None]:
    with deepspeed.zero.GatheredParameters(params, modifier_rank=0):
        yield


def check_making() -> None:
    """Initialize an adapter by a decomposition that changes the weight; masters keep their precision."""
    engine = trained(0, True)
    masters = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    with gathered_for_adapters(engine.module.head.weight):
        left, values, right = torch.linalg.svd(engine.module.head.weight.data.float(), full_matrices=False)
    whole = (left * values @ right).bfloat16()
    assert torch.equal(whole, masters["head.weight"].bfloat16())
    found = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters() if p.requires_grad}
    assert same(found, masters)
    with gathered_for_adapters(engine.module.base.weight):
        engine.module.base.weight.data.sub_(1)
    with deepspeed.zero.GatheredParameters(engine.module.base.weight):
        assert torch.equal(engine.module.base.weight, Actor().base.weight.bfloat16() - 1)
    engine.destroy()


@pytest.mark.parametrize("world", [1, 2])
def test_adapters_are_initialized_from_sharded_weights(world: int) -> None:
    run_ranks(check_making, world)
