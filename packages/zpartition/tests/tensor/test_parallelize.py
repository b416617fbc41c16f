"""Split models equal whole ones: outputs, gradients, and what each rank holds."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zcomm
from zcomm.testing import run_ranks
from zpartition.cells import addresses_of
from zpartition.shard import Shard, cut
from zpartition.tensor import TensorPlan, parallelize
from zpartition.tensor.testing import GATHERED, PLAN, SEQUENCE, Language


def tokens(seed: int = 0) -> Tensor:
    return torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(seed))


def whole_of(model: torch.nn.Module, name: str, values: Tensor) -> Tensor:
    """The global tensor of which every rank has the part that lies at the parameter's address."""
    address = addresses_of(model)[name]
    parts = list(cut(Shard, name, address, (0, values.numel()), values.reshape(-1).__getitem__))
    said = zcomm.exchange([[part.box, part.tensor.tolist()] for part in parts])
    found = torch.full(address.global_shape, torch.nan, dtype=torch.float64)
    for box, numbers in (part for rank in said for part in rank):
        place = found[tuple(slice(lo, hi) for lo, hi in box)]
        new = torch.tensor(numbers, dtype=torch.float64).view(place.shape)
        assert place.isnan().all() or torch.equal(place, new), f"copies of {name} differ"
        place.copy_(new)
    return found


def split_and_compare(plan: TensorPlan) -> dict[str, float]:
    """The largest difference of the loss and of each gradient."""
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
def test_losses_and_gradients_are_those_of_the_whole_model(world_size: int) -> None:
    plans = [PLAN] if world_size == 3 else [PLAN, SEQUENCE, GATHERED]
    for found in run_ranks(compare_all, world_size, plans):
        for differences in found:
            assert max(differences.values()) < 1e-12, differences
