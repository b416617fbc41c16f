"""Gates with DeepSpeed's dense results: equal to those of DeepSpeed 0.19.8, and a layer over them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine.deepspeed as deepspeed
from zcomm.testing import run_ranks
from zengine.deepspeed.moe.experts import Experts
from zengine.deepspeed.moe.mappings import drop_tokens, gather_tokens
from zengine.deepspeed.moe.sharded_moe import (
    MOELayer,
    TopKGate,
    einsum,
    multiplicative_jitter,
    top1gating,
    top2gating,
    topkgating,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/deepspeed_0_19_8.json").read_text())["gates"]


def _calls(logits: torch.Tensor) -> dict[str, Any]:
    """Return the calls that made the golden values, after torch.manual_seed(1), by name."""
    used = torch.tensor([1] * 10 + [0] * 2)
    calls: dict[str, Any] = {
        "top1": lambda s: top1gating(logits, 1.0, 0, sparse_routes=s),
        "top1rs": lambda s: top1gating(logits, 1.0, 2, noisy_gate_policy="RSample", use_rts=False, sparse_routes=s),
        "top1nd": lambda s: top1gating(logits, 1.0, 2, drop_tokens=False, used_token=used, sparse_routes=s),
        "top2": lambda s: top2gating(logits, 0.6, 0, sparse_routes=s),
        "top2n": lambda s: top2gating(
            logits, 0.6, 0, drop_tokens=False, top2_2nd_expert_sampling=False, sparse_routes=s
        ),
        "topknd": lambda s: topkgating(logits, 3, 0.6, 0, drop_tokens=False, sparse_routes=s),
    }
    for k in (1, 2, 3):
        for policy in ("probs", "position"):
            calls[f"topk{k}{policy}"] = lambda s, k=k, policy=policy: topkgating(
                logits, k, 0.6, 0, drop_policy=policy, sparse_routes=s
            )
    return calls


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_routes_are_those_of_deepspeed(name: str) -> None:
    torch.manual_seed(0)
    call = _calls(torch.randn(12, 4))[name]
    torch.manual_seed(1)
    found = [each.tolist() if torch.is_tensor(each) else each for each in call(True)]
    for mine, theirs in zip(found, GOLDEN[name], strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-5, rtol=0, check_dtype=False)
    torch.manual_seed(1)
    _, combine, mask, _ = call(False)
    _, capacity, num_experts, indices, places, gates, _ = GOLDEN[name]
    dense = torch.zeros(12, num_experts, capacity)
    for route in range(len(indices)):
        for token, (expert, place) in enumerate(zip(indices[route], places[route])):
            if expert >= 0:
                dense[token, expert, place] = gates[route][token]
    torch.testing.assert_close(combine, dense, atol=1e-5, rtol=0)
    assert torch.equal(mask, combine.bool())


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="3 tokens are fewer than min_capacity, 4"):
        top1gating(torch.zeros(3, 2), 1.0, 4)
    with pytest.raises(ValueError, match="drop_policy must be probs or position, got 'last'"):
        topkgating(torch.zeros(3, 2), 1, 1.0, 0, drop_policy="last")
    assert multiplicative_jitter(torch.ones(4), "cpu", 0) is not None
    assert float((multiplicative_jitter(torch.ones(99), "cpu") - 1).abs().max()) <= 0.01
    assert einsum("se,se->s", torch.eye(2), torch.eye(2)).tolist() == [1, 1]


def _layer(group: Any, size: int) -> tuple[torch.Tensor, list[Any]]:
    """Return output and gradients of a layer whose 4 experts are shared by `size` ranks."""
    torch.manual_seed(3)
    gate = TopKGate(6, 4, k=2, capacity_factor=4.0, top2_2nd_expert_sampling=False)
    layer = MOELayer(gate, Experts(nn.Linear(6, 6), 4 // size, "ep"), "ep", size, 4 // size)
    for number, expert in enumerate(layer.experts.deepspeed_experts):
        first = zcomm.group_rank(group) * (4 // size) if size > 1 else 0
        with torch.no_grad():
            expert.weight.fill_(0.1 * (first + number + 1))
            assert expert.weight.allreduce is False
            assert expert.weight.group_name == "ep"
    if size > 1:
        layer._set_ep_group(group)
        with pytest.raises(ValueError, match="expert-parallel group already"):
            layer._set_ep_group(group)
    x = torch.randn(5, 2, 6, requires_grad=True)
    out = layer(x, None)
    (out.sum() + layer.l_aux).backward()
    assert layer.exp_counts.sum() == 20
    return out.detach(), [x.grad, gate.wg.weight.grad]


def _shared_layer_is_the_whole_one() -> None:
    group = deepspeed.comm.get_world_group()
    (mine, grads), (whole, whole_grads) = _layer(group, 2), _layer(None, 1)
    torch.testing.assert_close(mine, whole)
    for a, b in zip(grads, whole_grads):
        torch.testing.assert_close(a, b)


class Mpu:
    def get_model_parallel_group(self) -> Any:
        return deepspeed.comm.get_world_group()


def _tokens_go_to_tensor_ranks_and_back() -> None:
    deepspeed.utils.groups.mpu = Mpu()
    try:
        x = torch.arange(12.0).view(2, 6).requires_grad_()
        for dim in (0, 1):
            x.grad = None
            part = drop_tokens(x, dim)
            assert torch.equal(part, x.chunk(2, dim)[zcomm.group_rank()])
            (gather_tokens(part, dim) * x.detach()).sum().backward()
            assert torch.equal(x.grad, x.detach())
    finally:
        deepspeed.utils.groups.mpu = None
    assert drop_tokens(x) is x
    assert gather_tokens(x) is x


def _both() -> None:
    _shared_layer_is_the_whole_one()
    _tokens_go_to_tensor_ranks_and_back()


def test_a_layer_over_two_ranks_is_the_whole_layer_and_tokens_are_split_over_tensor_ranks() -> None:
    run_ranks(_both, 2)
