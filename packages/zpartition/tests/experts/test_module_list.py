"""Lists of experts, called by loops of several kinds, sharded against whole."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcomm
from zcomm.testing import run_ranks
from zpartition.experts import active_fractions, distribute, find_experts
from zpartition.tensor import load_whole_state_dict, whole_state_dict
from zpartition.testing.expert_list_models import KINDS, WIDTH, ListModel, ListMoE


def _split(kind: str, expert: int, recomputed: str) -> tuple[float, list[float], list[int]]:
    """Differences of outputs and gradients, and the sizes of a weight on this rank."""
    torch.manual_seed(0)
    layer: Any = ListMoE(kind).double()
    world_size, rank = zcomm.group_size(), zcomm.group_rank()
    x = torch.randn(world_size, 2, 3, WIDTH, dtype=torch.float64)[rank].requires_grad_()
    if kind == "hit" and rank == 0:
        x = (x.detach() * 0).requires_grad_()  # all its tokens choose the same experts

    def gradients(run: Any) -> tuple[Tensor, list[Tensor | None]]:
        y, logits = run(x)
        params = [param for param in layer.parameters() if param.numel()]
        (y.square().sum() + logits.sum()).backward()
        found = [x.grad, *(param.grad for param in params)]
        x.grad = None
        layer.zero_grad()
        return y.detach(), found

    expected, wanted = gradients(layer)
    whole = dict(zip((name for name, _ in layer.named_parameters()), wanted[1:]))
    group = zcomm.consecutive_group(expert)
    for name, param in layer.named_parameters():
        sums = torch.zeros_like(param) if whole[name] is None else whole[name]
        if "experts" in name:
            zcomm.all_reduce(sums, group)
        whole[name] = sums
    distribute(layer, group)
    run: Any = layer
    if recomputed:
        run = functools.partial(checkpoint, layer, use_reentrant=recomputed == "reentrant")
    y, found = gradients(run)
    names = [name for name, param in layer.named_parameters() if param.numel()]
    errors = [float((found[0] - wanted[0]).abs().max())]
    for name, gradient in zip(names, found[1:]):
        own = torch.zeros_like(whole[name]) if gradient is None else gradient
        errors.append(float((own - whole[name]).abs().max()))
    return float((y - expected).abs().max()), errors, [each.w1.weight.shape[0] for each in layer.experts]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "expert", "recomputed"),
    [(2, 2, ""), (4, 4, ""), (4, 2, "plain"), (2, 2, "reentrant")],
)
def test_a_sharded_list_equals_the_whole(kind: str, world_size: int, expert: int, recomputed: str) -> None:
    for rank, (difference, errors, sizes) in enumerate(run_ranks(_split, world_size, kind, expert, recomputed)):
        assert difference == 0.0, "each request is computed as in one process"
        assert max(errors) < 1e-12
        assert sizes == [12 if index // (4 // expert) == rank % expert else 0 for index in range(4)]


def _whole() -> bool:
    model = ListModel()
    names, before = list(model.state_dict()), model.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    fractions = [active_fractions(model)[id(param)] for param in model.layers[0].experts.parameters()]
    distribute(model, None)
    assert [active_fractions(model)[id(param)] for param in model.layers[0].experts.parameters()] == fractions
    assert set(fractions) == {0.5}
    load_whole_state_dict(model, {name: 2 * value for name, value in before.items()})
    after = whole_state_dict(model)
    return list(after) == names and all(torch.equal(after[name], 2 * before[name]) for name in names)


def test_names_stay_and_whole_states_go_both_ways() -> None:
    assert run_ranks(_whole, 2) == [True, True]


def test_lists_are_found_by_name_or_beside_a_router() -> None:
    layer = ListMoE("all")
    assert list(find_experts(nn.Sequential(layer))) == ["0.experts"]
    layer.blocks = layer._modules.pop("experts")  # beside a router
    assert list(find_experts(layer)) == ["blocks"]
    assert not find_experts(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])}))


def _errors() -> list[str]:
    uneven, differing, buffered, shared = (ListMoE("all", 3 if number == 0 else 4) for number in range(4))
    differing.experts[1].w1 = nn.Linear(WIDTH, 11)
    buffered.experts[0].register_buffer("count", torch.zeros(1))
    shared.experts[1].w1.weight = shared.experts[0].w1.weight
    found, log = [], list[zcomm.Record]()
    for layer in (uneven, differing, buffered, shared):
        with zcomm.traced(log), pytest.raises(ValueError) as raised:
            distribute(nn.Sequential(layer), None)
        found.append(str(raised.value))
    assert not [record for record in log if "experts" in record.label]
    layer = ListMoE("all")
    distribute(nn.Sequential(layer), None)
    with pytest.raises(ValueError, match=r"0\.experts is sharded already"):
        distribute(nn.Sequential(layer), None)
    with pytest.raises(ValueError, match=r"expert 0.experts.2 was called outside of the forward of its layer"):
        layer.experts[2](torch.ones(1, WIDTH))
    return found


def test_unshardable_lists_raise_before_a_message() -> None:
    uneven, differing, buffered, shared = run_ranks(_errors, 2)[0]
    assert "0.experts: 3 experts cannot be sharded evenly over 2 ranks" in uneven
    assert "experts 0.experts.0 and 0.experts.1 have different parameters" in differing
    assert "0.experts has persistent buffers (0.count, ...)" in buffered
    assert "experts of 0.experts share parameters" in shared
