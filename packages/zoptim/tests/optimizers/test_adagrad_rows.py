"""Adagrad with the sparse gradients of embeddings: torch's Adagrad is the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoptim
from zoptim.states import formats

STEPS = ([0, 3, 3, 7], [1], [7, 0, 9, 7], [2, 4])  # the tokens of each step, some of them twice


class Words(nn.Module):
    """An embedding with sparse gradients beside a dense layer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(10, 6, sparse=True, dtype=dtype)
        self.head = nn.Linear(6, 2, dtype=dtype)

    def loss(self, tokens: list[int]) -> Tensor:
        return self.head(self.table(torch.tensor(tokens))).square().sum()


def train(make: Any, dtype: torch.dtype = torch.float32, factor: float = 1.0, **options: Any) -> tuple[Words, Any]:
    model = Words(dtype)
    optimizer = make(model.parameters(), lr=0.1, **options)
    if factor != 1.0:
        optimizer.grad_scale = torch.tensor(factor)
    for tokens in STEPS:
        optimizer.zero_grad()
        (model.loss(tokens) * factor).backward()
        assert model.table.weight.grad.is_sparse
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("foreach", [None, True], ids=["kernel", "torch"])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.filterwarnings("ignore:Adagrad updates")
def test_rows_train_as_torchs_do(dtype: torch.dtype, near: float, foreach: Any) -> None:
    options = {"lr_decay": 0.3, "initial_accumulator_value": 0.25}
    ours, mine = train(zoptim.Adagrad, dtype, foreach=foreach, **options)
    theirs, oracle = train(torch.optim.Adagrad, dtype, **options)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=near, atol=near)
        torch.testing.assert_close(mine.state[a]["sum"], oracle.state[b]["sum"], rtol=near, atol=near)
        assert float(mine.state[a]["step"]) == float(oracle.state[b]["step"]) == len(STEPS)


def test_other_rows_keep_their_bits_also_with_weight_decay() -> None:
    model, optimizer = train(zoptim.Adagrad, weight_decay=0.5)
    untouched, fresh = [5, 6, 8], Words(torch.float32).table.weight
    assert torch.equal(model.table.weight[untouched], fresh[untouched])
    assert not optimizer.state[model.table.weight]["sum"][untouched].any()
    plain, _ = train(zoptim.Adagrad)
    assert not torch.equal(model.table.weight[[0]], plain.table.weight[[0]])


def test_grad_scale_divides_rows_and_found_inf_skips_them() -> None:
    scaled, optimizer = train(zoptim.Adagrad, factor=1024.0)
    plain, _ = train(zoptim.Adagrad)
    assert torch.equal(scaled.table.weight, plain.table.weight)
    before = scaled.table.weight.detach().clone()
    optimizer.found_inf = torch.ones(())
    scaled.loss([0, 1]).backward()
    optimizer.step()
    assert torch.equal(scaled.table.weight, before)
    assert float(optimizer.state[scaled.table.weight]["step"]) == len(STEPS)


def test_bf16_sums_and_split_masters_are_rows_too() -> None:
    exact, _ = train(zoptim.Adagrad)
    narrow, optimizer = train(zoptim.Adagrad, state_dtype="bf16")
    assert optimizer.state[narrow.table.weight]["sum"].dtype is torch.bfloat16
    torch.testing.assert_close(narrow.table.weight, exact.table.weight, rtol=0.02, atol=0.02)
    wide = torch.linspace(-1, 1, 24).view(8, 3).bfloat16().float().requires_grad_()
    split = wide.detach().bfloat16().requires_grad_()
    both = zoptim.Adagrad([wide], lr=0.1), zoptim.Adagrad([split], lr=0.1, split_master=True, state_dtype="fp32")
    for row in (2, 5, 2):
        values = torch.tensor([[0.5, -0.25, 2.0]])
        for param, optimizer in zip((wide, split), both):
            param.grad = torch.sparse_coo_tensor([[row]], values.to(param.dtype), (8, 3))
            optimizer.step()
    joined = formats.join(split.detach(), both[1].state[split]["remainder"])
    assert torch.equal(joined, wide.detach())


def test_8_bit_states_raise_before_anything_changes() -> None:
    model = Words(torch.float32)
    optimizer = zoptim.Adagrad(model.named_parameters(), state_dtype="8bit")
    model.loss([1]).backward()
    before = model.head.weight.detach().clone()
    with pytest.raises(zoptim.UnsupportedTensorError, match=r"'table.weight'\) is sparse, and a scale of 8-bit"):
        optimizer.step()
    assert torch.equal(model.head.weight, before)
