"""Attention over split sequences equals attention over whole ones, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import DistributedAttention

LENGTH = 12


def rand(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, heads, tokens, width), causal, with shared keys."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def middle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for (batch, tokens, heads, width)."""
    return plain(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2)


def first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same for (tokens, batch, heads, width)."""
    return middle(q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)).transpose(0, 1)


LAYOUTS: list[tuple[Callable[..., Tensor], int, int]] = [(plain, 1, 2), (middle, 2, 1), (first, -2, 0)]


def _shape(heads: int, scatter: int, gather: int) -> tuple[int, ...]:
    shape = [2, 2, 2, 3]
    shape[scatter], shape[gather] = heads, LENGTH
    return tuple(shape)


def _worst(query: int, key_value: int, attention: Callable[..., Tensor], scatter: int, gather: int) -> float:
    """Return the largest difference of outputs and gradients."""
    size, mine = zcomm.group_size(), zcomm.group_rank()
    wholes = [
        rand(seed, *_shape(heads, scatter, gather)).requires_grad_()
        for seed, heads in enumerate((query, key_value, key_value))
    ]
    expected = attention(*wholes)
    upstream = rand(9, *expected.shape)
    expected.backward(upstream)

    def part(x: Tensor) -> Tensor:
        return x.chunk(size, gather)[mine]

    parts = [part(x.detach()).clone().requires_grad_() for x in wholes]
    out = DistributedAttention(attention, None, scatter, gather)(*parts)
    out.backward(part(upstream))
    pairs = [(out, part(expected)), *((a.grad, part(b.grad)) for a, b in zip(parts, wholes))]
    return max(float((a - b).abs().max()) for a, b in pairs)


def _all_shapes() -> list[float]:
    heads = [(4, 4), (4, 2), (6, 3), (5, 5), (4, 1), (6, 2)]
    return [_worst(query, key_value, *layout) for query, key_value in heads for layout in LAYOUTS]


@pytest.mark.parametrize("size", [2, 3])
def test_outputs_and_gradients_equal_those_of_whole_sequences(size: int) -> None:
    for found in run_ranks(_all_shapes, size):
        assert max(found) < 1e-12


class Dropping(nn.Module):
    """Ones of the shape of the output, some of them dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, q: Tensor, _k: Tensor, _v: Tensor) -> Any:
        return self.dropout(q)


def _traffic_and_others() -> dict[str, Any]:
    log: list[zcomm.Record] = []
    parts = [torch.ones(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    ulysses = DistributedAttention(scaled_dot_product_attention, None, 1, 2)
    with zcomm.traced(log):
        ulysses(*parts).sum().backward()
    calls = [(record.op, record.nbytes) for record in log]

    torch.manual_seed(5)  # alike on all ranks
    ones, dropping = torch.ones(1, 4, 6, 8, requires_grad=True), DistributedAttention(Dropping(), None, 1, 2)
    masks = dropping(ones, ones, ones)
    after = float(torch.rand(()))
    torch.manual_seed(5)
    again = checkpoint(dropping, ones, ones, ones, use_reentrant=False)
    again.sum().backward()

    def dropped(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        return dropout(q, dropout_p)

    by_name = DistributedAttention(dropped, None, 1, 2)(ones, ones, ones, dropout_p=0.5).detach()

    compiled = torch.compile(DistributedAttention(scaled_dot_product_attention, None, 1, 2), backend="aot_eager")
    leaves = [rand(zcomm.group_rank() + seed, 1, 4, 2, 8).requires_grad_() for seed in (0, 10, 20)]
    compiled(*leaves).square().sum().backward()
    twins = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    ulysses(*twins).square().sum().backward()
    for odd, message in [
        ([torch.ones(1, 1, 2, 8)] * 3, "1 query heads cannot be split over 2 sequence ranks"),
        ([torch.ones(1, 4, 2, 8), torch.ones(1, 2, 2, 8), torch.ones(1, 4, 2, 8)], "must have equal heads"),
        ([torch.ones(1, 4, 2, 8), torch.ones(4, 2, 8), torch.ones(1, 4, 2, 8)], "equally many dims"),
    ]:
        with pytest.raises(ValueError, match=message):
            ulysses(*odd)
    with pytest.raises(ValueError, match="returned a tuple"):
        DistributedAttention(lambda q, k, v: (q, None), None, 1, 2)(*parts)
    with pytest.raises(ValueError, match="must keep all dims but the last"):
        DistributedAttention(lambda q, k, v: q.transpose(1, 2), None, 1, 2)(*parts)
    with pytest.raises(ValueError, match="no dim 4"):
        DistributedAttention(scaled_dot_product_attention, None, 4, 2)(*parts)
    return {
        "calls": calls,
        "masks of ranks differ": not torch.equal(masks[:, :2], masks[:, 2:]),
        "masks by argument differ": not torch.equal(by_name[:, :2], by_name[:, 2:]),
        "dropped again alike": torch.equal(again, masks) and torch.equal(ones.grad, masks),
        "outer stream": after,
        "compiled": max(float((a.grad - b.grad).abs().max()) for a, b in zip(leaves, twins)),
    }


def test_messages_dropout_compilation_and_errors() -> None:
    found = run_ranks(_traffic_and_others, 2)
    nbytes = 4 * 2 * 8 * 4
    assert found[0]["calls"] == [("all_to_all", n * nbytes) for n in (3, 1, 1, 3)]
    for rank in found:
        assert rank["masks of ranks differ"]
        assert rank["masks by argument differ"]
        assert rank["dropped again alike"]
        assert rank["outer stream"] == found[0]["outer stream"]
        assert rank["compiled"] < 1e-12


def _flexed() -> list[float]:
    """Compare FlexAttention with a distance bias and a block mask of packed sequences to one process."""
    documents = torch.tensor([[0] * 5 + [1] * 7, [0] * LENGTH])
    looks_back = create_block_mask(
        lambda b, _head, i, j: (documents[b, i] == documents[b, j]) & (i >= j), 2, None, LENGTH, LENGTH, device="cpu"
    )

    def nearer(score: Tensor, _b: Tensor, _head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - 0.1 * (i - j)

    flex = partial(flex_attention, score_mod=nearer, block_mask=looks_back, enable_gqa=True)
    with backward_on_cpu():
        found = [_worst(4, 2, flex, 1, 2), _worst(6, 3, flex, 1, 2)]
    q, k, v = (rand(seed, 2, 4, LENGTH, 3) for seed in range(3))
    index = torch.arange(LENGTH)
    sees = (documents.unsqueeze(2) == documents.unsqueeze(1)) & (index.unsqueeze(1) >= index)
    bias = (-0.1 * (index.unsqueeze(1) - index)).double().masked_fill(~sees, -torch.inf).unsqueeze(1)
    return [*found, float((flex(q, k, v) - scaled_dot_product_attention(q, k, v, bias)).abs().max())]


@contextmanager
def backward_on_cpu() -> Iterator[None]:
    """Allow FlexAttention to be differentiated on a CPU, which works uncompiled."""
    with mock.patch("torch.nn.attention.flex_attention._validate_device", return_value=None):
        yield


def test_flex_attention_equals_one_process_forward_and_backward() -> None:
    for found in run_ranks(_flexed, 2):
        assert max(found) < 1e-12


def test_one_rank_runs_the_attention_itself() -> None:
    q, k, v = (rand(seed, 1, 4, 5, 3) for seed in range(3))
    ulysses = DistributedAttention(plain, None, 1, 2)
    assert torch.equal(ulysses(q, k, v), plain(q, k, v))
    assert "ranks=1" in repr(ulysses)
