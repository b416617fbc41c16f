"""Transformers' blocks, with their own forward, sharded against whole."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.experts import (
    dispatch_around,
    distribute,
    find_experts,
    own_experts_of,
    own_hf_experts,
    whole_hf_experts,
)
from zpartition.experts.huggingface import shard_hf_experts
from zpartition.layout.hf_experts import is_hf_experts
from zpartition.layout.model_parallel import ALONE, expert_ranks_of, expert_shards_of

HIDDEN = 6


class Stack(nn.Module):
    """Experts as in Transformers: all in two parameters, called with the router's choice."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.randn(num_experts, 10, HIDDEN))
        self.down_proj = nn.Parameter(torch.randn(num_experts, HIDDEN, 5))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, slots = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[expert].t()).chunk(2, dim=-1)
            inner = torch.nn.functional.silu(gate) * up
            y = y.index_add(0, tokens, inner @ self.down_proj[expert].t() * top_k_weights[tokens, slots, None])
        return y


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(HIDDEN, 4)
        self.experts = Stack()

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.gate(x).softmax(-1).topk(2, dim=-1)
        y: Tensor = self.experts(x, top_k_weights=weights, top_k_index=index)
        return y


def test_a_stack_is_recognized_by_signature_and_shapes() -> None:
    assert is_hf_experts(Stack())
    assert not is_hf_experts(nn.Linear(2, 2))
    odd = Stack()
    odd.down_proj = nn.Parameter(torch.zeros(3, 2, 2))
    assert not is_hf_experts(odd)
    assert list(find_experts(Sparse())) == ["experts"]


def _whole() -> tuple[bool, bool, bool]:
    torch.manual_seed(0)
    whole = Sparse()
    torch.manual_seed(0)
    split = Sparse()
    distribute(split, None)
    found = whole_hf_experts(split.experts)
    assert found is not None
    equal = all(torch.equal(a, b) for a, b in zip(found.parameters(), whole.experts.parameters(), strict=True))
    x, chosen = torch.randn(3, HIDDEN), torch.tensor([[0], [3], [1]])
    same = torch.equal(found(x, chosen, torch.ones(3, 1)), whole.experts(x, chosen, torch.ones(3, 1)))
    return type(found) is Stack, equal, same and whole_hf_experts(whole.experts) is None


def test_a_copy_with_the_experts_of_all_ranks_is_of_the_original_class() -> None:
    assert run_ranks(_whole, 2) == [(True, True, True)] * 2


class Doubled(nn.Module):
    """Computes a rank's experts in another way, without parameters."""

    def __init__(self, own: nn.Module) -> None:
        super().__init__()
        self.own, self.numbers = (own,), set[int]()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        self.numbers |= set(top_k_index.flatten().tolist())
        y: Tensor = 2 * self.own[0](hidden_states, top_k_index, top_k_weights)
        return y


def _around() -> tuple[bool, set[int], list[int], tuple[int, int]]:
    torch.manual_seed(0)
    whole = Sparse()
    torch.manual_seed(0)
    split = Sparse()
    distribute(split, None)
    own = own_hf_experts(split.experts)
    assert own is not None
    assert type(own) is Stack
    assert own.down_proj is split.experts.down_proj
    made = Doubled(own)
    split.experts = dispatch_around(made, split.experts)
    x, chosen = torch.randn(4, HIDDEN), torch.tensor([[0, 3], [3, 1], [1, 2], [2, 0]])
    weights = torch.rand(4, 2)
    same = torch.allclose(split.experts(x, chosen, weights), 2 * whole.experts(x, chosen, weights), atol=1e-5)
    numbers, ranks = own_experts_of(split.experts), expert_ranks_of(split)
    assert expert_shards_of(split) == {}, "it has no parameters"
    return same, made.numbers, list(numbers), (ranks.size, expert_ranks_of(whole).size)


def test_the_dispatch_fits_around_another_module() -> None:
    for rank, found in enumerate(run_ranks(_around, 2)):
        assert found == (True, {0, 1}, [2 * rank, 2 * rank + 1], (2, 1))
    assert list(own_experts_of(Stack())) == [0, 1, 2, 3]
    assert own_hf_experts(Stack()) is None


def _twice() -> str:
    split = Sparse()
    distribute(split, None)
    assert list(find_experts(split)) == ["experts"]
    with pytest.raises(ValueError, match="distribute") as raised:
        distribute(split, None)
    return str(raised.value)


def test_a_stack_is_sharded_once() -> None:
    assert run_ranks(_twice, 2) == ["experts: it is sharded already: distribute() may be called once."] * 2


def _split(world_size: int) -> tuple[list[float], float, str]:
    torch.manual_seed(0)
    model = Sparse().double()
    x = torch.randn(world_size, 5, HIDDEN, dtype=torch.float64)[zcomm.group_rank()].requires_grad_()
    y = model(x)
    params = list(model.parameters())
    wanted = torch.autograd.grad(y.square().sum(), [x, *params])
    y = y.detach()  # a graph that is alive remembers whole weights
    for gradient in wanted[1:]:
        zcomm.all_reduce(gradient)
    distribute(model, None)
    share = 4 // world_size
    own = slice(zcomm.group_rank() * share, (zcomm.group_rank() + 1) * share)
    z = model(x)
    found = torch.autograd.grad(z.square().sum(), [x, *params])
    errors = [float((found[0] - wanted[0]).abs().max())]
    errors += [float((ours - theirs[own]).abs().max()) for ours, theirs in zip(found[3:], wanted[3:])]
    return errors, float((y - z).abs().max()), type(model.experts).__name__


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_sharded_stack_equals_the_whole(world_size: int) -> None:
    for errors, difference, name in run_ranks(_split, world_size, world_size):
        assert max(*errors, difference) < 1e-12
        assert name == "ExpertParallelStack"


def _without_tokens() -> list[bool]:
    """All tokens go to rank 0's experts, and do not require gradients (lower layers are frozen)."""
    torch.manual_seed(0)
    model = Sparse()
    distribute(model, None)
    x = torch.randn(5, HIDDEN)
    y = model.experts(x, top_k_index=torch.zeros(5, 1, dtype=torch.int64), top_k_weights=torch.ones(5, 1))
    y.sum().backward()  # rank 0's exchanges gradients, and so must rank 1's
    return [param.grad is not None and bool(param.grad.any()) for param in model.experts.parameters()]


def test_a_rank_whose_experts_get_no_tokens_runs_backward() -> None:
    assert run_ranks(_without_tokens, 2) == [[True, True], [False, False]]


def test_a_sharded_stack_works_in_a_subclass() -> None:
    model = Sparse()
    x = torch.randn(5, HIDDEN)
    expected = model(x)
    shard_hf_experts(model.experts, ALONE)
    kind = type(model.experts)
    model.experts.__class__ = type(kind.__name__, (kind,), {})  # as checkpointed blocks get one
    torch.testing.assert_close(model(x), expected)
