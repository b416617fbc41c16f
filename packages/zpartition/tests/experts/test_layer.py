"""The layer against experts called one by one, and errors of its arguments."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn

from zpartition.experts.gates import dense_mask
from zpartition.experts.layer import MoE
from zpartition.experts.mlp import ExpertMLP

REFERENCE = (
    "hidden_size expert num_experts ep_size k capacity_factor eval_capacity_factor min_capacity use_residual "
    "noisy_gate_policy drop_tokens use_rts use_tutel enable_expert_tensor_parallelism top2_2nd_expert_sampling"
)


def test_the_signature_equals_deepspeed() -> None:
    signature = inspect.signature(MoE)
    assert " ".join(signature.parameters) == REFERENCE
    defaults = [parameter.default for parameter in list(signature.parameters.values())[2:]]
    assert defaults == [1, 1, 1, 1.0, 1.0, 4, False, None, True, True, False, False, True]


def one_by_one(layer: MoE, x: Tensor) -> Tensor:
    """Apply every expert to every token, and sum by weight."""
    flat = x.reshape(-1, x.shape[-1])
    routing = layer.gate(flat)
    weights = dense_mask(routing, layer.num_experts)
    outputs = []
    for expert in range(layer.num_experts):
        counts = [0] * layer.num_experts
        counts[expert] = flat.shape[0]
        outputs.append(layer.experts(flat, counts))
    return torch.einsum("te,eth->th", weights, torch.stack(outputs)).view(x.shape)


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("expert", [ExpertMLP(8, 12), nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))])
def test_the_output_is_the_weighted_sum_of_experts(k: int, expert: nn.Module) -> None:
    torch.manual_seed(0)
    layer = MoE(8, expert, 4, k=k, capacity_factor=0.8, use_rts=False, top2_2nd_expert_sampling=False).double()
    x = torch.randn(3, 7, 8, dtype=torch.float64, requires_grad=True)
    y, aux_loss, counts = layer(x)
    expected = one_by_one(layer, x)
    torch.testing.assert_close(y, expected)
    leaves = [x, *layer.parameters()]
    found = torch.autograd.grad(y.square().sum(), leaves)
    for ours, theirs in zip(found, torch.autograd.grad(expected.square().sum(), leaves)):
        torch.testing.assert_close(ours, theirs)
    assert aux_loss.shape == ()
    assert int(counts.sum()) == 21 * k


def test_residual_adds_a_dense_copy_of_the_expert() -> None:
    torch.manual_seed(0)
    expert = ExpertMLP(8, 12)
    layer = MoE(8, expert, 2, use_residual=True, drop_tokens=False)
    x = torch.randn(5, 8)
    mix = layer.coefficient(x).softmax(-1)  # type: ignore[misc]
    torch.testing.assert_close(layer(x)[0], one_by_one(layer, x) * mix[:, :1] + expert(x) * mix[:, 1:])


def test_unused_tokens_get_zeros() -> None:
    layer = MoE(8, ExpertMLP(8, 12), 2, drop_tokens=False)
    y, _, counts = layer(torch.randn(2, 3, 8), torch.tensor([[1, 0, 1], [0, 0, 1]]))
    assert [bool(row.any()) for row in y.view(6, 8)] == [True, False, True, False, False, True]
    assert int(counts.sum()) == 3


def test_it_keeps_the_dtype_of_a_narrow_model() -> None:
    layer = MoE(8, ExpertMLP(8, 12), 2).to(torch.bfloat16)
    assert layer(torch.randn(6, 8, dtype=torch.bfloat16))[0].dtype == torch.bfloat16


def test_wrong_numbers_raise_with_the_numbers() -> None:
    expert = ExpertMLP(8, 12)
    with pytest.raises(ValueError, match=r"6 experts cannot be sharded evenly over 4 ranks: .* 1, 2, 3, 6"):
        MoE(8, expert, 6, ep_size=4)
    with pytest.raises(ValueError, match="k is 3, but must be between 1 and the number of experts, 2"):
        MoE(8, expert, 2, k=3)
    with pytest.raises(ValueError, match="use_tutel"):
        MoE(8, expert, 2, use_tutel=True)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_zero_tokens_give_zero_loss_and_zero_gradients(k: int) -> None:
    layer = MoE(8, ExpertMLP(8, 12), 4, k=k)
    x = torch.empty(2, 0, 8, requires_grad=True)
    y, aux_loss, counts = layer(x)
    assert (y.shape, float(aux_loss.detach()), counts.tolist()) == (x.shape, 0.0, [0] * 4)
    (y.sum() + aux_loss).backward()
    assert not any(param.grad is None or param.grad.any() for param in layer.parameters())
