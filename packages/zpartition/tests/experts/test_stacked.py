"""Stacks of experts: their initialisation, names, addresses, and what they compute."""

from __future__ import annotations

import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zcomm.testing import run_ranks
from zpartition import Init, recording
from zpartition.deferred.init import Deferred
from zpartition.deferred.recording import key_of
from zpartition.experts.dispatch import TokenDispatch
from zpartition.experts.mlp import ExpertMLP
from zpartition.experts.stacked import ExpertParameter, Experts
from zpartition.layout.model_parallel import (
    ALONE,
    ExpertShardedModule,
    ModelParallelGroup,
    addresses_of,
    expert_shards_of,
)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 6))


def made(num_experts: int = 4, expert_group: ModelParallelGroup = ALONE) -> Experts:
    torch.manual_seed(1)
    return Experts(plain(), num_experts, expert_group)


def test_names_are_those_of_one_expert_and_rows_go_to_their_expert() -> None:
    torch.manual_seed(0)
    expert = plain()
    stack = Experts(expert, 3)
    assert [name for name, _ in stack.named_parameters()] == [
        f"stacked.{name}" for name, _ in expert.named_parameters()
    ]
    rows = torch.randn(5, 6)
    y = stack(rows, [2, 0, 3])
    torch.testing.assert_close(y[:2], expert(rows[:2]))
    weights = {name: stack.get_parameter(f"stacked.{name}")[2] for name, _ in expert.named_parameters()}
    torch.testing.assert_close(y[2:], torch.func.functional_call(expert, weights, (rows[2:],)))


def test_experts_differ_and_do_not_depend_on_sharding() -> None:
    whole = made().stacked.state_dict()
    assert not torch.equal(whole["0.weight"][0], whole["0.weight"][1])
    for rank in range(2):
        part = made(expert_group=ModelParallelGroup(object(), 2, rank))  # type: ignore[arg-type]
        for name, value in part.stacked.state_dict().items():
            assert torch.equal(value, whole[name][part.own.start : part.own.stop])


def test_building_experts_draws_one_number() -> None:
    made(8)
    following = torch.rand(3)
    torch.manual_seed(1)
    plain(), torch.randint(2**31, ())
    assert torch.equal(torch.rand(3), following)


def test_a_callable_builds_each_expert_under_its_own_seed() -> None:
    torch.manual_seed(0)
    stack = Experts(lambda: ExpertMLP(4, 6), 3)
    weights = stack.get_parameter("stacked.up.weight")
    assert weights.shape == (3, 6, 4)
    assert len({weight.sum().item() for weight in weights}) == 3


def test_shard_keeps_identities_and_sets_addresses() -> None:
    whole, stack = made(), made()
    params = dict(stack.named_parameters())
    stack.shard(ModelParallelGroup(object(), 2, 1))  # type: ignore[arg-type]
    assert isinstance(stack, ExpertShardedModule)
    for name, param in stack.named_parameters():
        assert param is params[name]
        assert torch.equal(param, whole.get_parameter(name)[2:])
    address = addresses_of(stack)["stacked.3.weight"]
    assert (address.global_shape, address.boxes) == ((4, 6, 8), (((2, 4), (0, 6), (0, 8)),))
    assert set(expert_shards_of(stack)) == set(params)
    assert "2-3 of 4 x Sequential" in repr(stack)
    with pytest.raises(ValueError, match="sharded already"):
        stack.shard(ModelParallelGroup(object(), 2, 1))  # type: ignore[arg-type]


def test_tensor_ranks_have_parts_of_each_expert() -> None:
    stack = Experts(ExpertMLP(4, 6, "gelu", bias=True), 2)
    tensor = ModelParallelGroup(object(), 2, 1)  # type: ignore[arg-type]
    stack.shard(ModelParallelGroup(object(), 2, 0), tensor)  # type: ignore[arg-type]
    found = stack.addresses()
    assert found["stacked.up.weight"].boxes == (((0, 1), (3, 6), (0, 4)),)
    assert found["stacked.down.weight"].boxes == (((0, 1), (0, 4), (3, 6)),)
    assert (found["stacked.down.bias"].num_copies, found["stacked.down.bias"].copy) == (2, 1)
    with pytest.raises(ValueError, match="ExpertMLP, but the expert is a Sequential"):
        made().shard(ModelParallelGroup(object(), 2, 0), tensor)  # type: ignore[arg-type]


def test_indivisible_experts_and_shared_state_raise() -> None:
    with pytest.raises(ValueError, match=r"6 experts cannot be sharded evenly over 4 ranks: .* from 1, 2, 3, 6"):
        made(6).shard(ModelParallelGroup(object(), 4, 0))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="persistent buffers"):
        Experts(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), 2)


@pytest.mark.parametrize("other", [nn.Linear(4, 1), nn.Linear(4, 3, bias=False)], ids=["size", "names"])
def test_experts_of_different_shapes_raise(other: nn.Module) -> None:
    made = iter([nn.Linear(4, 3), other])
    with pytest.raises(ValueError, match=r"must have equal shapes: one has the parameters .*, the first .*\[3, 4\]"):
        Experts(lambda: next(made), 2)


def test_a_stack_without_rows_is_part_of_the_graph() -> None:
    stack, rows = made(), torch.zeros(0, 6, requires_grad=True)
    stack(rows, [0, 0, 0, 0]).sum().backward()
    assert rows.grad is not None
    assert all(param.grad is not None and not param.grad.any() for param in stack.parameters())


def test_stacks_are_built_on_the_meta_device() -> None:
    with torch.device("meta"):
        stack = made()
    assert stack.get_parameter("stacked.0.weight").is_meta


def seeded_expert() -> nn.Module:
    """Draws by rejection, and after its own seed."""
    expert = plain()
    nn.init.trunc_normal_(expert[0].weight)
    torch.manual_seed(int(expert[0].weight.shape[0]))
    expert[3].reset_parameters()
    return expert


@pytest.mark.parametrize("of", [plain, lambda: seeded_expert], ids=["copies", "made anew"])
def test_a_stack_built_inside_init_has_the_values_of_a_plain_one(of: Callable[[], Any]) -> None:
    def build() -> nn.Module:
        torch.manual_seed(7)
        return nn.Sequential(nn.Linear(6, 6), Experts(of(), 3), nn.Linear(6, 6))

    expected = build()
    following = torch.rand(3)
    with Init():
        model = build()
    found: dict[str, Tensor] = {}
    deferred = Deferred.of(model, torch.device("cpu"))
    assert deferred is not None
    deferred.fill(lambda name, values: found.update({name: values.clone()}), None)
    assert torch.equal(torch.rand(3), following)
    assert sorted(found) == sorted(expected.state_dict())
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())
    weights = dict(model.named_parameters())
    assert type(weights["1.stacked.0.weight"]) is ExpertParameter


def test_materializing_sharded_stacks_needs_the_memory_of_one() -> None:
    width, number, layers = 16, 4, 5
    with Init() as init:
        model = nn.ModuleList(Experts(nn.Linear(width, width, bias=False), number) for _ in range(layers))
    for stack in model:
        with recording(stack):
            stack.shard(ModelParallelGroup(object(), 2, 0))
    wanted = frozenset(key_of(param) for param in model.parameters())
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    original = torch.empty

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        found = original(*args, **kwargs)
        made.append(weakref.ref(found))
        alive.append(sum(each.numel() for reference in made if (each := reference()) is not None))
        return found

    with unittest.mock.patch.object(torch, "empty", counted):
        init.recorded.replay(lambda key, content: None, wanted=wanted)
    expert = width * width * 4
    assert len(made) > layers * number
    assert max(alive) <= (number + number // 2) * expert + 100 * layers, "a stack, its part, and a number for each"


def _under_autocast() -> tuple[float, float]:
    """All tokens go to rank 0's expert; return the differences of output and gradient from a whole stack."""
    whole, stack = made(2), made(2)
    stack.shard(ModelParallelGroup.of(None))
    x, choice = torch.randn(3, 6), torch.zeros(3, 1, dtype=torch.int64)
    found = []
    for experts in (whole, stack):
        with torch.autocast("cpu", torch.bfloat16):
            dispatch = TokenDispatch.plan(choice, torch.ones(3, 1, dtype=torch.bool), 2, experts.expert_group)
            y = dispatch.combine(experts(dispatch.send(x), dispatch.counts), torch.ones(3, 1))
        y.sum().backward()
        found.append((y.detach(), experts.get_parameter("stacked.0.weight").grad))
    (y, _), (z, grad) = found
    assert grad is not None
    return float((y - z).abs().max()), float(grad.abs().max())


def test_a_rank_without_rows_has_the_dtype_of_the_others_under_autocast() -> None:
    (difference, gradient), (other, none) = run_ranks(_under_autocast, 2)
    assert difference == other == 0.0
    assert gradient > none == 0.0
