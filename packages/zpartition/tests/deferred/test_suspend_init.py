"""Suspended blocks: models are partitioned inside open `Init` blocks, which then continue."""

from __future__ import annotations

import random
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Init, ZeroPolicy, suspend_init
from zpartition.deferred.init import _recordings


class Block(nn.Module):
    """Random weights of several kinds, one that draws until it fits, a buffer and a real parameter."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 3), nn.Linear(3, width)
        self.noise = nn.Parameter(torch.randn(2, width) * 0.02)
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("steps", torch.arange(0, 6, 2) + 1)
        nn.init.trunc_normal_(self.first.weight, std=0.02)
        nn.init.zeros_(self.second.bias)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    with zpartition.gathered(module):
        return {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}


def same(module: nn.Module, plain: nn.Module) -> bool:
    found, expected = state_of(module), plain.state_dict()
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def is_deferred(module: Block) -> bool:
    return module.first.weight.device.type == "meta"


def strict(stage: int) -> ZeroPolicy:
    return ZeroPolicy(stage=stage, unit_numel=20, persist_numel=0)


def _partitions_inside(stage: int, seed_by_rank: bool) -> list[bool]:
    """Build and partition models in open, nested and closed blocks; compare with a plain program of rank 0's seed."""
    torch.manual_seed(3)
    before, actor, inner, critic, last, after = (Block(width) for width in (3, 4, 5, 6, 7, 8))
    follows = torch.rand(3)
    torch.manual_seed(3 + (zcomm.group_rank() if seed_by_rank else 0))
    plain, found, partitions = Block(3), [], []
    with Init():
        here = [Block(4)]
        partitions += [zpartition.shard(each, policy=strict(stage)) for each in (here[0], plain)]
        with Init():
            here.append(Block(5))
            found.append(is_deferred(here[1]))
            here.append(Block(6))
            partitions.append(zpartition.shard(here[2], policy=strict(stage)))
        here.append(Block(7))
        found.append(is_deferred(here[1]) and is_deferred(here[3]))
        partitions.append(zpartition.shard(here[1], policy=strict(stage)))
        here.append(Block(8))
    partitions += [zpartition.shard(each, policy=strict(stage)) for each in (here[3], here[4])]
    if not seed_by_rank or zcomm.group_rank() == 0:
        found.append(torch.equal(torch.rand(3), follows))
    pairs = zip((plain, *here), (before, actor, inner, critic, last, after), strict=True)
    return [*found, *(same(*pair) for pair in pairs)]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(("world", "seed_by_rank"), [(1, False), (2, False), (2, True)])
def test_models_are_partitioned_in_open_nested_and_closed_blocks(stage: int, world: int, seed_by_rank: bool) -> None:
    assert all(all(found) for found in run_ranks(_partitions_inside, world, stage, seed_by_rank))


class Program:
    """A random program: it seeds, opens and closes blocks, builds modules, and partitions some of them.

    Run without blocks, it is its own oracle.
    """

    def __init__(self, seed: int, deferred: bool) -> None:
        self.random, self.deferred = random.Random(seed), deferred
        self.built: list[Block] = []
        self.pending: list[Block] = []
        self.partitions: list[Any] = []
        torch.manual_seed(seed)

    def run(self) -> list[dict[str, torch.Tensor]]:
        for _ in range(4):
            self.block(depth=0)
            while self.pending:  # a later block draws after models that are materialized
                self.partition()
            self.built.append(Block(3))
        return [state_of(module) for module in self.built]

    def block(self, depth: int) -> None:
        with Init(enabled=self.deferred, make_buffers=self.random.random() < 0.5):
            for _ in range(self.random.randrange(7)):
                step = self.random.choice((self.build, self.build, self.partition, self.partition_plain, self.seed))
                if depth < 2 and self.random.random() < 0.3:
                    self.block(depth + 1)
                step()

    def build(self) -> None:
        self.pending.append(Block(self.random.randint(2, 5)))
        self.built.append(self.pending[-1])
        assert is_deferred(self.built[-1]) == self.deferred

    def partition(self) -> None:
        if self.pending:
            module = self.pending.pop(self.random.randrange(len(self.pending)))
            self.partitions.append(zpartition.shard(module))

    def partition_plain(self) -> None:
        with torch.random.fork_rng(devices=[]), suspend_init():
            module = Block(3)
        self.partitions.append(zpartition.shard(module))

    def seed(self) -> None:
        torch.manual_seed(self.random.randrange(100))


@pytest.mark.parametrize("seed", range(25))
def test_random_programs_with_blocks_equal_those_without(seed: int) -> None:
    found, expected = Program(seed, True).run(), Program(seed, False).run()
    assert len(found) == len(expected) > 4
    for mine, plain in zip(found, expected):
        assert all(torch.equal(mine[name], plain[name]) for name in plain)


def test_inside_everything_is_real_and_afterwards_deferred_again() -> None:
    registered: list[int] = []
    torch.manual_seed(3)
    with Init(dtype=torch.bfloat16, make_buffers=True, registered=lambda params: registered.append(len(params))):
        model = Block()
        assert model.noise.dtype == torch.bfloat16
        with suppress(ArithmeticError), suspend_init(), suspend_init():
            assert torch.get_default_dtype() == torch.float32
            assert torch.empty(2).device.type == "cpu"
            assert torch.empty(2, device="meta").is_meta
            torch.manual_seed(9)
            inside = Block()
            raise ArithmeticError
        assert torch.get_default_dtype() == torch.bfloat16
        torch.set_default_dtype(torch.float32)
        with suspend_init():
            assert torch.get_default_dtype() == torch.float32, "the user's, not that of the block"
        again = Block()
        assert is_deferred(again)
        assert not again.first.weight.is_meta
    assert registered == [6, 5, 11], "without those that were real, or built while the block was suspended"
    assert is_deferred(model)
    assert model.steps.device.type == "cpu"
    torch.manual_seed(9)
    assert same(inside, Block())
    expected = Block()  # numbers follow those that were drawn inside
    zpartition.shard(again)
    assert same(again, expected)


class Counting(TorchDispatchMode):
    """A user's mode that counts random operations."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def test_contexts_of_others_may_lie_between_and_stay_in_effect() -> None:
    torch.manual_seed(3)
    plain, following = nn.GRU(3, 4), nn.Linear(3, 4)
    torch.manual_seed(3)
    with ExitStack() as stack:
        stack.enter_context(Init())
        counting = stack.enter_context(Counting())
        stack.enter_context(torch.device("meta"))
        model = nn.GRU(3, 4)
        num_built = counting.num
        zpartition.shard(model)
        assert counting.num == 2 * num_built, "replayed under the user's mode"
        assert torch.empty(2).device.type == "meta"
        late = nn.Linear(3, 4)
    assert late.weight.device.type == "meta"
    zpartition.shard(late)
    assert same(model, plain)
    assert same(late, following)
    with torch.device("meta"):
        zpartition.shard(plain)
        assert torch.empty(2).device.type == "meta"
    assert same(plain, model)


def test_a_new_recording_begins_once_nothing_is_pending() -> None:
    torch.manual_seed(3)
    with Init() as init:
        models = [Block(), Block()]
        models[1].itself = [models[1]]  # garbage that only the collector finds
        first = init.recorded
        zpartition.shard(models[0])
        assert init.recorded is first, "the second model is in it"
        del models[1]
        zpartition.shard(Block())
        assert init.recorded is not first
        assert not init.recorded.steps
        assert first not in _recordings.values()


def test_a_block_inside_a_suspended_one_is_its_own() -> None:
    torch.manual_seed(3)
    plain = [Block(), Block()]
    torch.manual_seed(3)
    with Init() as outer:
        first = Block()
        zpartition.shard(first)
        with suspend_init(), Init() as inner:
            second = Block()
            assert inner.recorded is not outer.recorded
            assert is_deferred(second)
        assert not outer.recorded.steps
        zpartition.shard(second)
    assert same(first, plain[0])
    assert same(second, plain[1])


def test_numbers_and_buffers_are_there_in_nested_blocks() -> None:
    with Init(make_buffers=True), Init(make_buffers=True):
        rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        model = Block()
        assert model.steps.tolist() == [1, 3, 5]
    assert rates == [0, 0.5, 1]


def test_parts_of_two_blocks_make_one_model() -> None:
    def build(enabled: bool) -> list[nn.Module]:
        parts = []
        for seed in (4, 5):
            torch.manual_seed(seed)
            with Init(enabled=enabled):
                parts.append(Block(seed))
        return parts

    expected, following = build(False), torch.rand(3)
    model = nn.Sequential(*build(True))
    with zpartition.recording(model):
        model.to(torch.float64)
    zpartition.shard(model)
    assert torch.equal(torch.rand(3), following)
    assert all(torch.equal(param, plain.double()) for param, plain in
               zip(model.parameters(), nn.Sequential(*expected).parameters()))  # fmt: skip
    assert model[1].steps.tolist() == [1, 3, 5]


def _gathers_in_an_open_block(stage: int) -> list[bool]:
    torch.manual_seed(3)
    plain, other, ones = Block(), Block(), torch.ones(3, 4)
    torch.manual_seed(3)
    with Init():
        early = Block()
    with zpartition.gathered(early):  # materialized, and not partitioned
        pass
    with Init():
        model = Block()
        partition = zpartition.shard(model, policy=strict(stage))
        with zpartition.gathered(early):
            found = [torch.equal(early.noise, plain.noise)]
        with zpartition.gathered(model.first, modifier_rank=0):
            nn.init.ones_(model.first.weight)
        found.append(torch.equal(state_of(model)["first.weight"], ones))
        partition.close()
        found.append(torch.equal(model.first.weight, ones))
        again = zpartition.shard(model, policy=strict(stage))
        found.append(torch.equal(state_of(model)["noise"], other.noise))
        found.append(is_deferred(Block()))
    again.close()
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_weights_can_be_gathered_and_partitions_closed_in_an_open_block(world: int, stage: int) -> None:
    assert all(map(all, run_ranks(_gathers_in_an_open_block, world, stage)))


def _seeds_differ() -> str:
    with Init():
        model = Block()
        if zcomm.group_rank() == 0:
            torch.manual_seed(1)
        model.second = nn.Linear(3, 4)
        with pytest.raises(
            ValueError, match=r"operations and seeds by rank.*torch\.manual_seed at the same"
        ) as caught:
            zpartition.shard(model)
        assert is_deferred(Block())
    return str(caught.value)


def test_ranks_that_seed_at_different_places_are_told() -> None:
    first, second = run_ranks(_seeds_differ, 2)
    assert first == second


def _single_numbers() -> list[float]:
    torch.manual_seed(zcomm.group_rank())
    models = [nn.Module() for _ in range(3)]
    with Init():
        for model in models[:2]:
            model.weight = nn.Parameter(torch.rand(1))
        zpartition.shard(models[0])
        models[2].weight = nn.Parameter(torch.rand(1))
    for model in models[1:]:
        zpartition.shard(model)
    return [model.weight.item() for model in models]


def test_ranks_with_other_seeds_take_rank_0s_after_a_suspension() -> None:
    torch.manual_seed(0)
    expected = [torch.rand(1).item() for _ in range(3)]
    assert run_ranks(_single_numbers, 2) == [expected, expected]
