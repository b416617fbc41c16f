"""Rebinding optimizers and addressing their state, at world size 1."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import zpartition
from zpartition.layout.address import Address
from zpartition.layout.layout import ParamSpec, plan_layout
from zpartition.state import optimizer_state as state
from zpartition.state.optimizer_state import check_optimizer, is_elementwise

ELEMENTWISE = [
    lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    lambda p: torch.optim.Adagrad(p, lr=0.1),
    lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    lambda p: torch.optim.NAdam(p, lr=0.01),
    lambda p: torch.optim.RAdam(p, lr=0.01),
    lambda p: torch.optim.Adamax(p, lr=0.01),
    lambda p: torch.optim.Adadelta(p),
    lambda p: torch.optim.Rprop(p, lr=0.01),
    lambda p: torch.optim.ASGD(p, lr=0.01),
]


def _model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def _train(model, step, zero, num_steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        model(torch.randn(4, 5, generator=generator)).square().mean().backward()
        step()
        zero()


def _partitioned(model, optimizer, num_steps, seed=1):
    partition = zpartition.shard(model, optimizer)

    def step():
        partition.finish_gradients()
        partition.apply(optimizer.step)

    _train(model, step, partition.zero_grad, num_steps, seed)
    return partition


@pytest.mark.parametrize("make", ELEMENTWISE, ids=lambda make: type(make([nn.Parameter(torch.ones(1))])).__name__)
def test_a_rebound_optimizer_trains_as_it_would_on_the_parameters(make):
    ours, theirs = _model(), _model()
    _partitioned(ours, make(ours.parameters()), 5)
    optimizer = make(theirs.parameters())
    _train(theirs, optimizer.step, optimizer.zero_grad, 5)
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{name}: {m}")


def test_state_from_before_the_partition_moves_along():
    ours, theirs = _model(), _model()
    mine, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs))
    _train(ours, mine.step, mine.zero_grad, 3)
    _partitioned(ours, mine, 3, seed=2)
    _train(theirs, other.step, other.zero_grad, 3)
    _train(theirs, other.step, other.zero_grad, 3, seed=2)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_parameters_that_share_a_shard_go_on_with_their_own_step_counts():
    ours, theirs = _model(), _model()
    mine, other = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (ours, theirs))
    for model, optimizer in ((ours, mine), (theirs, other)):
        for _ in range(5):
            model[0](torch.ones(1, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    _partitioned(ours, mine, 3, seed=2)
    _train(theirs, other.step, other.zero_grad, 3, seed=2)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_that_is_neither_an_elements_each_nor_a_number_is_not_joined():
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state[model[0].weight] = {"codebook": torch.zeros(7)}
    with pytest.raises(
        ValueError, match=r"one 'codebook' is a tensor of shape \(7,\), neither .*\. Partition before the first"
    ):
        zpartition.shard(model, optimizer)


def test_parameter_groups_keep_their_hyperparameters_and_their_parameters():
    model = _model()
    groups = [{"params": [model[0].weight, model[2].weight]}, {"params": [model[0].bias, model[2].bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    partition = zpartition.shard(model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
    named = {holder.tensor: [piece.slot.name for piece in holder.pieces] for holder in partition.holders}
    assert [named[group["params"][0]] for group in optimizer.param_groups] == [
        ["2.weight", "0.weight"],
        ["2.bias", "0.bias"],
    ]


def test_an_optimizer_that_needs_shapes_keeps_the_parameters_when_nothing_is_cut():
    ours, theirs = _model(), _model()
    partition = _partitioned(ours, torch.optim.Adafactor(ours.parameters(), lr=0.1), 4)
    optimizer = torch.optim.Adafactor(theirs.parameters(), lr=0.1)
    _train(theirs, optimizer.step, optimizer.zero_grad, 4)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters()))
    assert len(partition.holders) == 4


def test_an_optimizer_that_needs_shapes_is_rejected_where_masters_are_apart():
    model = _model().to(torch.bfloat16)
    with pytest.raises(ValueError, match="Adafactor needs whole tensors"):
        zpartition.shard(model, torch.optim.Adafactor(model.parameters()))


def test_subclasses_and_other_packages_optimizers_that_need_shapes_are_known():
    class Scaled(torch.optim.Adafactor):
        pass

    class Lamb(torch.optim.SGD):
        pass

    model = _model().to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"Scaled needs whole tensors .* Use zoptim\.Adafactor, which works"):
        zpartition.shard(model, Scaled(model.parameters()))
    with pytest.raises(ValueError, match=r"Lamb needs whole tensors .* Use zoptim\.LAMB, which works"):
        zpartition.shard(model, Lamb(model.parameters(), lr=0.1))
    assert not is_elementwise(Lamb([nn.Parameter(torch.ones(1))]))


def test_an_unknown_optimizer_is_believed_with_a_warning_unless_it_says_itself():
    class Mine(torch.optim.SGD):
        pass

    class Says(Mine):
        elementwise = False

    with pytest.warns(UserWarning, match="Mine is not known"):
        assert is_elementwise(Mine([nn.Parameter(torch.ones(1))]))
    assert not is_elementwise(Says([nn.Parameter(torch.ones(1))]))


def test_coded_state_from_before_the_partition_moves_along_as_numbers(coded_momentum):
    ours, theirs = _model(), _model()
    mine, other = coded_momentum(ours.parameters()), coded_momentum(theirs.parameters())
    _train(ours, mine.step, mine.zero_grad, 3)
    _partitioned(ours, mine, 3, seed=2)
    _train(theirs, other.step, other.zero_grad, 3)
    _train(theirs, other.step, other.zero_grad, 3, seed=2)
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)  # blocks lie elsewhere now


def test_a_split_master_is_rejected_where_masters_are_kept_here():
    model = _model().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["split_master"] = True
    with pytest.raises(
        ValueError, match=r"SGD was created with split_master=True \(parameter group 0\), but .* Leave"
    ):
        zpartition.shard(model, optimizer)


def test_an_optimizer_that_looks_at_shapes_is_rejected_where_tensors_are_split_over_tensor_ranks():
    address = Address((4, 3), (((0, 2), (0, 3)),))
    layout = plan_layout([ParamSpec("w", (2, 3), torch.float32, address=address)], world_size=1, num_shards=1)
    model = torch.nn.Linear(3, 2)
    state.check_model_parallel(torch.optim.AdamW(model.parameters()), layout)
    with pytest.raises(
        ValueError,
        match=r"Muon needs whole tensors, but 1 are split over .* ranks \(w, ",
    ):
        state.check_model_parallel(torch.optim.Muon([model.weight]), layout)


class DenseAndSparse(torch.optim.Optimizer):
    """Two optimizers in one, as scripts with sparse embeddings write it."""

    def __init__(self, dense: list[nn.Parameter], sparse: list[nn.Parameter]) -> None:
        super().__init__(dense + sparse, {})
        self.of_dense, self.of_sparse = torch.optim.Adam(dense), torch.optim.SparseAdam(sparse)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.of_dense.step()
        self.of_sparse.step()


def test_optimizers_inside_update_the_modules_parameters_sparse_ones_with_sparse_gradients():
    def train(optimizer: torch.optim.Optimizer, model: nn.Sequential, partition: Any) -> None:
        for _ in range(2):
            with partition.micro_step() if partition else contextlib.nullcontext():
                model(torch.tensor([[1, 2], [2, 4]])).square().sum().backward()
            if partition:
                partition.finish_gradients()
                with partition.zero_grad_on_exit():
                    partition.apply(optimizer.step)
            else:
                optimizer.step()
                optimizer.zero_grad()

    def make() -> tuple[nn.Sequential, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.EmbeddingBag(6, 3, mode="sum", sparse=True), nn.Linear(3, 1))
        return model, DenseAndSparse(list(model[1].parameters()), list(model[0].parameters()))

    (plain, alone), (model, optimizer) = make(), make()
    train(alone, plain, None)
    train(optimizer, model, zpartition.shard(model, optimizer, policy=zpartition.ZeroPolicy()))
    for ours, theirs in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(ours, theirs)
    model, optimizer = make()
    with pytest.raises(ValueError, match=r"optimizers inside \(Adam, SparseAdam\)"):
        check_optimizer(optimizer, cuts=True)
