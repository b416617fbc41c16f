"""Adagrad: its accumulator in the precision that was asked for, and sparse gradients."""

from __future__ import annotations

import pytest
import torch

from zengine.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad


@pytest.mark.parametrize(("in_fp32", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_the_sum_of_squares_is_kept_as_it_was_asked_for(in_fp32: bool, dtype: torch.dtype):
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = DeepSpeedCPUAdagrad([weight], lr=0.5, fp32_optimizer_states=in_fp32)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert optimizer.state[weight]["sum"].dtype == dtype
    assert torch.allclose(weight.detach(), torch.full_like(weight, 0.5))


def test_sparse_gradients_of_an_embedding_train_as_in_torch():
    tables = [torch.nn.Embedding(8, 3, sparse=True) for _ in range(2)]
    tables[1].load_state_dict(tables[0].state_dict())
    optimizers = DeepSpeedCPUAdagrad(tables[0].parameters()), torch.optim.Adagrad(tables[1].parameters())
    for tokens in ([1, 1, 5], [0, 5], [7]):
        for table, optimizer in zip(tables, optimizers, strict=True):
            optimizer.zero_grad()
            table(torch.tensor(tokens)).square().sum().backward()
            assert table.weight.grad.is_sparse
            optimizer.step()
    torch.testing.assert_close(tables[0].weight, tables[1].weight, rtol=1e-6, atol=1e-7)
