"""Split layers keep identity, hooks, type and size attributes."""

from __future__ import annotations

import copy

import torch
from torch import nn

import zcomm
from zcomm.testing import run_ranks
from zpartition.tensor import (
    Column,
    ColumnLinear,
    Row,
    RowLinear,
    Rule,
    TensorPlan,
    Uncovered,
    by_outputs,
    load_whole_state_dict,
    parallelize,
)
from zpartition.tensor.layers import ColumnConv1D, GatheredConv1D, RowConv1D
from zpartition.testing.tensor_models import PLAN, Language


class Conv1D(nn.Module):
    """Conv1D as in Transformers: the weight is (in, out)."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf, dtype=torch.float64))
        self.bias = nn.Parameter(torch.randn(nf, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.bias


def conv_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(Conv1D(10, 4), nn.GELU(), Conv1D(4, 10), Conv1D(5, 4), nn.Tanh(), Conv1D(4, 5))


def _transposed(splits_outputs: bool) -> float:
    whole, split = conv_model(), conv_model()
    styles = (Column(), Row(), Column(gathers=True), Row(takes_part=True))
    rules = [Rule(name, style) for name, style in zip("0235", styles)]
    parallelize(split, by_outputs(TensorPlan(rules)) if splits_outputs else TensorPlan(rules))
    assert isinstance(split[0], ColumnConv1D)
    assert isinstance(split[2], GatheredConv1D if splits_outputs else RowConv1D)
    assert (split[0].nf, split[2].nf) == (5, 2 if splits_outputs else 4)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    y = x.detach().clone().requires_grad_()
    whole(x).square().sum().backward()
    split(y).square().sum().backward()
    return float((x.grad - y.grad).abs().max())


def _messages() -> list[str]:
    model = Language()
    parallelize(model, PLAN)
    records: list[zcomm.Record] = []
    with zcomm.traced(records.append):
        model(torch.zeros(1, 4, dtype=torch.long)).backward()
    assert zcomm.group_size() == 2
    assert max(_transposed(splits_outputs=False), _transposed(splits_outputs=True)) < 1e-12
    return [record.label for record in records]


def test_a_block_sends_two_sums_forward_and_two_backward() -> None:
    labels = run_ranks(_messages, 2)[0]
    assert labels.count("tensor outputs") == 2 * 3 + 1  # and that of the embedding
    assert labels.count("tensor input gradients") == 2 * 3 + 1  # and that of the head
    assert len(labels) == 2 * 7 + 1  # the head's outputs are gathered


def test_models_on_meta_are_split() -> None:
    plan = TensorPlan([Rule("0", Column()), Rule("1", Row())])
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    parallelize(model, plan)
    model.to_empty(device="cpu")
    whole = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    load_whole_state_dict(model, whole.state_dict())
    assert torch.equal(model(torch.ones(1, 4)), whole(torch.ones(1, 4)))


def test_a_layer_keeps_its_identity_and_hooks() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    layers, params = list(model), list(model.parameters())
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    parallelize(model, TensorPlan([Rule("0", Column()), Rule("1", Row())], Uncovered.KEEP))
    assert [a is b for a, b in zip(model, layers)] == [True, True]
    assert all(a is b for a, b in zip(model.parameters(), params))
    assert isinstance(model[0], ColumnLinear)
    assert isinstance(model[1], RowLinear)
    assert isinstance(model[0], nn.Linear)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(torch.ones(1, 4)), model(torch.ones(1, 4)))
    assert calls == ["forward"] * 2
