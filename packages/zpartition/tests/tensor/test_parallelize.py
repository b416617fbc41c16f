"""Split models equal whole ones: outputs, gradients, and what each rank holds."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.testing import end_ranks, run_ranks
from zpartition.layout.address import Shard, cut
from zpartition.layout.model_parallel import addresses_of
from zpartition.tensor import Column, Row, Rule, TensorPlan, by_outputs, parallelize
from zpartition.testing.tensor_models import GATHERED, PLAN, SEQUENCE, Block, Grouped, Language


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed))


def whole_of(model: torch.nn.Module, name: str, values: Tensor) -> Tensor:
    """Rebuild the global tensor from the ranks' parts and their addresses."""
    address = addresses_of(model)[name]
    parts = list(cut(Shard, name, address, (0, values.numel()), values.reshape(-1).__getitem__))
    gathered = zcomm.all_gather_object([[part.box, part.tensor.tolist()] for part in parts])
    found = torch.full(address.global_shape, torch.nan, dtype=torch.float64)
    for box, numbers in (part for rank in gathered for part in rank):
        placement = found[tuple(slice(lo, hi) for lo, hi in box)]
        new = torch.tensor(numbers, dtype=torch.float64).view(placement.shape)
        assert placement.isnan().all() or torch.equal(placement, new), f"copies of {name} differ"
        placement.copy_(new)
    return found


def split_and_compare(plan: TensorPlan) -> dict[str, float]:
    """Return the largest difference of the loss and of each gradient."""
    whole = Language()
    loss = whole(tokens())
    loss.backward()
    torch.manual_seed(zcomm.group_rank())
    split = Language()
    with torch.no_grad():  # ranks start from rank 0's weights
        for param in split.parameters():
            param += zcomm.group_rank()
    ties = split.head.weight is split.embed.weight
    parallelize(split, plan)
    assert (split.head.weight is split.embed.weight) == ties
    ours = split(tokens())
    ours.backward()
    found = {"loss": abs(float((ours - loss).detach()))}
    for name, param in whole.named_parameters():
        grad = dict(split.named_parameters())[name].grad
        found[name] = float((whole_of(split, name, grad) - param.grad).abs().max())
        assert torch.equal(whole_of(split, name, dict(split.named_parameters())[name].detach()), param.detach())
    return found


def compare_all(plans: list[TensorPlan]) -> list[dict[str, float]]:
    return [split_and_compare(plan) for plan in plans]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_losses_and_gradients_equal_the_whole_model(world_size: int) -> None:
    plans = [PLAN] if world_size == 3 else [PLAN, SEQUENCE, GATHERED]
    plans += [by_outputs(plan) for plan in plans[:2]]
    for found in run_ranks(compare_all, world_size, plans):
        for differences in found:
            assert max(differences.values()) < 1e-12, differences


def checkpointed() -> list[float]:
    """Return the largest difference of gradients under both variants of activation checkpointing."""
    found = []
    for reentrant in (False, True):
        grads = []
        for recomputes in (False, True):
            model = Language()
            parallelize(model, PLAN)
            for block in model.blocks if recomputes else ():
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)
            model(tokens()).backward()
            grads.append([param.grad for param in model.parameters()])
        found.append(max(float((a - b).abs().max()) for a, b in zip(*grads)))
    return found


def test_activation_checkpoints_of_both_kinds_work() -> None:
    assert run_ranks(checkpointed, 2) == [[0.0, 0.0]] * 2


def dtensor_losses() -> list[float]:
    """Run torch's tensor parallelism with the same plan, on blocks whose heads divide."""
    mesh = init_device_mesh("cpu", (zcomm.group_size(),))
    model = two_blocks()
    for block in model:
        plan = {"attention.o_proj": RowwiseParallel(), "mlp.down": RowwiseParallel()}
        columns = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "mlp.gate", "mlp.up")
        parallelize_module(block, mesh, {**plan, **dict.fromkeys(columns, ColwiseParallel())})
        block.attention.num_heads //= 2
        block.attention.num_key_value_heads //= 2
    return sgd(model)


def our_losses() -> list[float]:
    model = two_blocks()
    rules = [Rule("*.attention.o_proj", Row()), Rule("*.mlp.down", Row()), Rule("*.*.*", Column())]
    parallelize(model, TensorPlan(rules))
    return sgd(model)


def two_blocks() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(Grouped(4, 2), inner=36) for _ in range(2))).double()


def sgd(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 5, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def both() -> tuple[list[float], list[float]]:
    return our_losses(), dtensor_losses()


def test_losses_equal_torch_dtensor_under_the_same_plan() -> None:
    try:
        for ours, theirs in run_ranks(both, 2):
            assert ours == pytest.approx(theirs, abs=1e-13)
            assert ours == pytest.approx(sgd(two_blocks()), abs=1e-13)
    finally:
        end_ranks()  # torch keeps meshes for ever
