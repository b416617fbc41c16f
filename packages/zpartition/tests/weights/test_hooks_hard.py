"""Unshard hooks, hard cases: data-dependent control flow, modes, second derivatives, failures, retries."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy

WIDTH = 48


def policy(stage: int, *, prefetch: int = 0) -> ZeroPolicy:
    return ZeroPolicy(stage=stage, unit_numel=2500, persist_numel=0, max_live_numel=0, prefetch_numel=prefetch)


class Mixture(nn.Module):
    """Experts of which each rank uses others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return x + self.experts[chosen](x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.mixtures = nn.ModuleList(Mixture() for _ in range(2))

    def forward(self, x: torch.Tensor, step: int, rank: int) -> torch.Tensor:
        for layer, mixture in zip(self.layers, [*self.mixtures, None]):
            x = torch.tanh(layer(x))
            x = x if mixture is None else mixture(x, (step + rank) % 4)
        return x.square().sum()


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _mixes(prefetch: int) -> dict[str, torch.Tensor]:
    model, rank = Net(), zcomm.group_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    partition = zpartition.shard(model, optimizer, policy=policy(3, prefetch=prefetch))
    for step in range(4):
        with partition.micro_step():
            model(inputs(step, rank), step, rank).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("prefetch", [0, 10_000])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_whose_data_use_other_experts_train_like_one_process(world_size: int, prefetch: int) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        for rank in range(world_size):
            (model(inputs(step, rank), step, rank) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_mixes, world_size, prefetch):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def _evaluates_then_trains() -> bool:
    model = Net()
    partition = zpartition.shard(model, policy=policy(3))
    with torch.inference_mode():
        model(inputs(0, 0), 0, 0)
    with partition.micro_step():
        model(inputs(0, 0), 0, 0).backward()
    return all(bool(gradient.isfinite().all()) for gradient in partition.finish_gradients())


def test_inference_mode_leaves_nothing_that_training_cannot_use() -> None:
    assert run_ranks(_evaluates_then_trains, 2) == [True, True]


def _forgets() -> int:
    """Forwards without a backward, and a backward that fails."""
    model = Net()
    partition = zpartition.shard(model, policy=policy(3))
    before = graphs()
    for step in range(3):
        model(inputs(step, 0), 0, 0)
    loss = model(inputs(0, 0), 0, 0)
    partition.unsharder.version += 1
    with pytest.raises(RuntimeError, match="from before the optimizer"), partition.micro_step():
        loss.backward()
    del loss
    return graphs() - before


def graphs() -> int:
    """Tensors that somebody computed and autograd still keeps."""
    gc.collect()
    return sum(type(found) is torch.Tensor and found.grad_fn is not None for found in gc.get_objects())


def test_a_graph_without_a_backward_goes_with_its_loss() -> None:
    assert run_ranks(_forgets, 2) == [0, 0]


def _penalises(stage: int) -> list[float]:
    model = Net()
    partition = zpartition.shard(model, policy=policy(stage))
    x = inputs(0, 0).requires_grad_()
    with partition.micro_step():
        (slope,) = torch.autograd.grad(model(x, 0, 0), x, create_graph=True)
        model(inputs(1, 0), 0, 0)  # uses the buffers again
        slope.square().sum().backward()
    partition.finish_gradients()
    return [float(zpartition.safe_get_full_grad(layer.weight).norm()) for layer in model.layers]


def test_second_derivatives_are_those_of_whole_weights() -> None:
    assert run_ranks(_penalises, 2, 3)[0] == pytest.approx(run_ranks(_penalises, 2, 2)[0], rel=1e-5)


def _uses_inside_a_block(stage: int) -> list[float]:
    model = Net()
    partition = zpartition.shard(model, policy=policy(stage))
    with partition.micro_step():
        with zpartition.gathered(model.layers):
            loss = sum(layer.weight.pow(3).sum() for layer in model.layers)
        model(inputs(1, 0), 0, 0)
        loss.backward()
    partition.finish_gradients()
    return [float(zpartition.safe_get_full_grad(layer.weight).norm()) for layer in model.layers]


def test_a_loss_over_gathered_weights_may_be_differentiated_after_the_block() -> None:
    assert run_ranks(_uses_inside_a_block, 2, 3)[0] == pytest.approx(
        run_ranks(_uses_inside_a_block, 2, 2)[0], rel=1e-5
    )


class Returns(nn.Module):
    """A root without weights of its own that returns a part of another unit's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, float]:
        penalty = sum(float(p.detach().square().sum()) for p in self.parameters())
        return self.first.weight[:2], penalty + float(self.second(x).sum())


def _keeps_an_output(stage: int) -> tuple[list[float], float]:
    model = Returns()
    zpartition_of = zpartition.shard(model, policy=policy(stage))
    kept, penalty = model(torch.ones(1, WIDTH))
    model(torch.ones(1, WIDTH))
    assert zpartition_of.layout.numel > 0
    return kept.detach().flatten()[:4].tolist(), penalty


def test_what_a_module_returns_of_its_weights_stays_and_parameters_can_be_walked_over() -> None:
    (kept, penalty), (expected, other) = run_ranks(_keeps_an_output, 2, 3)[0], run_ranks(_keeps_an_output, 2, 2)[0]
    assert kept == expected
    assert penalty == pytest.approx(other, rel=1e-5)


def edit_and_fail(weight: nn.Parameter) -> None:
    with zpartition.gathered(weight), torch.no_grad():
        weight.fill_(7.0)
        raise ArithmeticError


def _edits_anywhere() -> tuple[float, float]:
    model = Net()
    partition = zpartition.shard(model, policy=policy(3))
    weight = model.layers[0].weight
    with zpartition.gathered(weight):
        before = float(weight.sum())
    refused = pytest.raises(ValueError, match="edited inside gathered")
    with refused, zpartition.gathered(weight), torch.no_grad():
        weight[0 if zcomm.group_rank() else -1] = 5.0  # the other rank's part
    with pytest.raises(ArithmeticError):
        edit_and_fail(weight)
    with zpartition.gathered(weight):
        after = float(weight.sum())
    assert partition.unsharder.live_numel == 0
    return before, after


def test_edits_of_another_ranks_part_are_rejected_and_failures_undo_them() -> None:
    assert all(before == after for before, after in run_ranks(_edits_anywhere, 2))


def _fails_then_tries_again() -> None:
    with zpartition.Init():
        model = Net()
    with pytest.raises(ValueError, match="leaves contains 'typo'"):
        zpartition.shard(model, policy=ZeroPolicy(stage=3, leaves=("typo",)))
    partition = zpartition.shard(model, policy=policy(3))
    assert bool(model(inputs(0, 0), 0, 0).isfinite())
    partition.close(keep_weights=False)
    with pytest.raises(ValueError, match=r"parameter layers.0.weight has no weights: .* Build the module again"):
        zpartition.shard(model, policy=policy(3))


def test_a_module_whose_weights_are_gone_is_not_trained_on_in_silence() -> None:
    run_ranks(_fails_then_tries_again, 2)


def _grows() -> tuple[int, int]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16 * i, 16 * (i + 1)) for i in range(1, 9)))
    strict = ZeroPolicy(stage=3, unit_numel=1, persist_numel=0, max_live_numel=0, prefetch_numel=0)
    partition = zpartition.shard(model, policy=strict)
    with partition.micro_step():
        model(torch.ones(1, 16)).sum().backward()
    planned = zpartition.plan(model, policy=strict, world_size=2)
    return partition.ledger()["gathered units"], planned.gathered_units


def test_units_that_grow_do_not_pile_up_buffers() -> None:
    assert all(held <= planned for held, planned in run_ranks(_grows, 2))
