"""Rounded row counts: same bits, few shapes, and memory that does not grow with the steps."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from zcomm.testing import run_ranks
from zpartition.experts.huggingface import shard_hf_experts
from zpartition.experts.mlp import ExpertMLP
from zpartition.experts.row_padding import RowPadding, round_total
from zpartition.experts.stacked import Experts
from zpartition.layout.model_parallel import ALONE

COUNTS = ([33, 0, 150, 7], [90, 70, 1, 40], [0, 0, 3, 0], [0, 0, 0, 0])


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Context that switches padding off."""
    kept = lambda x, counts, numel: RowPadding(tuple(counts), tuple(counts))  # noqa: E731
    monkeypatch.setattr(RowPadding, "choose", kept)
    monkeypatch.setattr("zpartition.experts.mlp.round_total", lambda x, counts: sum(counts))
    return monkeypatch


def gradients(experts: nn.Module, rows: Tensor, call) -> list[Tensor]:
    """Return output, gradients of the rows and of all parameters."""
    leaf = rows.clone().requires_grad_()
    experts.zero_grad()
    y = call(leaf)
    (y.float() * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    found = [y.detach(), leaf.grad, *(param.grad for param in experts.parameters())]
    assert all(tensor is not None for tensor in found)
    return [tensor.clone() for tensor in found if tensor is not None]


def bits(found: list[Tensor]) -> list[list[int]]:
    return [tensor.contiguous().view(-1).view(torch.uint8).tolist() for tensor in found]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("activation", "bias"), [("gelu", True), ("swiglu", False), ("geglu", True)])
def test_outputs_and_gradients_keep_their_bits(dtype, activation, bias, exact) -> None:
    torch.manual_seed(0)
    experts = Experts(ExpertMLP(32, 64, activation, bias=bias), 4).to(dtype)
    inputs = [torch.randn(sum(counts), 32, dtype=dtype) for counts in COUNTS]

    def run() -> list[list[list[int]]]:
        calls = zip(inputs, COUNTS)
        return [bits(gradients(experts, rows, lambda leaf, c=counts: experts(leaf, c))) for rows, counts in calls]

    wanted = run()
    exact.undo()
    assert run() == wanted


class Stack(nn.Module):
    """Experts in Transformers' form."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 96, 32))
        self.down_proj = nn.Parameter(torch.randn(4, 32, 48))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        y = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            tokens, slots = torch.where(top_k_index == expert)
            gate, up = (hidden_states[tokens] @ self.gate_up_proj[expert].t()).chunk(2, dim=-1)
            inner = nn.functional.silu(gate) * up
            y = y.index_add(0, tokens, inner @ self.down_proj[expert].t() * top_k_weights[tokens, slots, None])
        return y


def test_hugging_face_experts_keep_their_bits(exact) -> None:
    torch.manual_seed(0)
    stack = Stack().bfloat16()
    shard_hf_experts(stack, ALONE)
    x = torch.randn(90, 32, dtype=torch.bfloat16)
    index, weights = torch.randint(0, 4, (90, 1)), torch.rand(90, 1).bfloat16()

    def run() -> list[list[int]]:
        return bits(gradients(stack, x, lambda leaf: stack(leaf, index, weights)))

    wanted = run()
    exact.undo()
    assert run() == wanted


def test_counts_are_rounded_where_it_pays() -> None:
    narrow, wide = torch.empty(0, dtype=torch.bfloat16), torch.empty(0)
    sizes = {RowPadding.choose(narrow, [count, 2000 - count], 4096).padded[0] for count in range(500, 1300)}
    assert len(sizes) == 12  # multiples of 64, from 1024 on of 128
    assert all(
        count <= RowPadding.choose(narrow, [count, 1000], 4096).padded[0] <= 1.125 * count + 64
        for count in range(3000)
    )
    assert RowPadding.choose(narrow, [5, 0, 3], 4096).padded == (5, 0, 3)
    assert RowPadding.choose(narrow, [999, 33], 2**21).padded == (999, 64)  # the first is as large as it pays
    assert RowPadding.choose(wide, [999, 33], 4096).padded == (999, 33)
    with torch.autocast("cpu", torch.bfloat16):
        assert RowPadding.choose(wide, [999, 33], 4096).padded == (1024, 64)
    on_device = torch.empty(0, dtype=torch.bfloat16, device="meta")
    assert RowPadding.choose(on_device, [999, 33], 4096).padded == (999, 33)
    assert (round_total(wide, [999, 34]), round_total(on_device, [999, 34])) == (1088, 1033)


def test_rows_move_and_return() -> None:
    padding = RowPadding((2, 0, 1), (3, 0, 2))
    rows = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, requires_grad=True)
    assert padding.spread(rows).tolist() == [[1.0], [2.0], [0.0], [3.0], [0.0]]
    assert padding.collect(padding.spread(rows)).equal(rows)
    assert torch.autograd.gradcheck(padding.spread, rows)
    assert torch.autograd.gradgradcheck(padding.spread, rows)


def _resident_growth_bytes() -> int:
    """Growth of this process's memory over 120 steps with counts of their own, after a first one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    numbers = random.Random(0)
    experts = Experts(ExpertMLP(128, 256, "gelu"), 2).bfloat16()
    x = torch.randn(2048, 128, dtype=torch.bfloat16)

    def step() -> None:
        counts = [numbers.randrange(700, 1000) for _ in range(2)]
        gradients(experts, x[: sum(counts)], lambda leaf: experts(leaf, counts))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    step()
    begin = resident()
    for _ in itertools.repeat(None, 120):
        step()
    return resident() - begin


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_does_not_grow_with_the_steps() -> None:
    (grown,) = run_ranks(_resident_growth_bytes, 1)
    assert grown < 100 * 2**20  # it was 600 MiB with a kernel for each count
