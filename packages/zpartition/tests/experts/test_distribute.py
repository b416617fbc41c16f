"""Distribution of experts: stacks found, errors before any message, and a gradient bucket for each expert group."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.experts import ExpertMLP, MoE, distribute, expert_degree, find_experts
from zpartition.tensor import load_whole_state_dict, whole_state_dict
from zpartition.testing import norm_of
from zpartition.testing.expert_models import MoELanguageModel, batches


def test_stacks_are_found_by_path_and_pattern() -> None:
    model = MoELanguageModel()
    assert list(find_experts(model)) == [f"blocks.{index}.moe.experts" for index in range(3)]
    assert list(find_experts(model, r"s\.1\.moe")) == ["blocks.1.moe.experts"]


def test_expert_degree_reads_ep_size_from_the_layers() -> None:
    expert = ExpertMLP(4, 4)
    assert expert_degree(nn.Linear(2, 2)) == 1
    assert expert_degree(nn.Sequential(MoE(4, expert, 4, ep_size=2))) == 2
    with pytest.raises(ValueError, match=r"different ep_size \(0 has 2, 1 has 4"):
        expert_degree(nn.Sequential(MoE(4, expert, 4, ep_size=2), MoE(4, expert, 4, ep_size=4)))


def _errors() -> list[str]:
    log: list[zcomm.Record] = []
    found = []
    with zcomm.traced(log):
        for model in (nn.Linear(2, 2), nn.Sequential(MoE(4, ExpertMLP(4, 4), 3)), _partitioned()):
            with pytest.raises(ValueError) as raised:
                distribute(model, None)
            found.append(str(raised.value))
    assert not [record for record in log if "experts" in record.label]
    return found


def _partitioned() -> nn.Module:
    model = nn.Sequential(MoE(4, ExpertMLP(4, 4), 2))
    _kept.append(zpartition.shard(model))
    return model


_kept: list[object] = []


def test_unshardable_models_raise_before_a_message() -> None:
    nothing, uneven, owned = run_ranks(_errors, 2)[0]
    assert "no experts found in Linear to shard over 2 ranks" in nothing
    assert "0.experts: 3 experts cannot be sharded evenly over 2 ranks: choose ep_size (autoep_size)" in uneven
    assert "is partitioned already" in owned


def _unsplit() -> list[str]:
    """The second layer cannot be split over tensor ranks: the first stays whole, and nothing is sent."""
    found, log = [], list[zcomm.Record]()
    for second in (ExpertMLP(4, 5), nn.Linear(4, 4)):
        model = nn.Sequential(
            *(MoE(4, e, 2, enable_expert_tensor_parallelism=True) for e in (ExpertMLP(4, 6), second))
        )
        shapes = [param.shape for param in model.parameters()]
        with zcomm.traced(log), pytest.raises(ValueError) as raised:
            distribute(model, zcomm.consecutive_group(1), tensor=dist.group.WORLD)
        found.append(str(raised.value))
        assert [param.shape for param in model.parameters()] == shapes
    model = nn.Sequential(MoE(4, ExpertMLP(4, 6), 2))
    distribute(model, None)
    with zcomm.traced(log), pytest.raises(ValueError) as raised:
        distribute(model, None)
    assert not log
    return [*found, str(raised.value)]


def test_unsplittable_or_sharded_experts_raise_before_a_message() -> None:
    uneven, other, again = run_ranks(_unsplit, 2)[0]
    assert "1.experts: an inner size of 5 does not divide by 2 tensor ranks" in uneven
    assert "1.experts: expert tensor parallelism needs a zpartition.experts.ExpertMLP, but the expert is a L" in other
    assert "0.experts: these experts are sharded already" in again


def _strided_experts() -> str:
    """Experts sharded over ranks that are not consecutive."""
    model = nn.Sequential(MoE(4, ExpertMLP(4, 4), 2))
    distribute(model, zcomm.strided_group(2))
    with pytest.raises(ValueError, match="not 2 consecutive ranks") as raised:
        zpartition.shard(model)
    return str(raised.value)


def test_experts_on_unexpected_ranks_raise_in_shard() -> None:
    assert (
        "0.experts.stacked.gate.weight is sharded over the expert-parallel ranks [0, 2]"
        in run_ranks(_strided_experts, 4)[0]
    )


def _facts() -> tuple[list[tuple[int, int, int]], dict[str, Tensor], list[int]]:
    """Return (group, shards, span) of buckets, weights after a round trip, ranks that sum expert gradients."""
    torch.manual_seed(zcomm.group_rank())  # ranks disagree: rank 0's count
    model = MoELanguageModel()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param))
    distribute(model, zcomm.consecutive_group(2))
    before = whole_state_dict(model)
    load_whole_state_dict(model, {name: 2 * value for name, value in before.items()})
    for name, value in whole_state_dict(model).items():
        assert torch.equal(value, 2 * before[name]), name
    partition = zpartition.shard(model, policy=ZeroPolicy(stage=2))
    buckets = [
        (b.num_expert_shards, b.num_shards, b.span(partition.rank)[0] // b.span_numel)
        for b in partition.layout.buckets
    ]
    holders = partition.ranks.groups_for(next(b for b in partition.layout.buckets if b.num_expert_shards > 1)).world
    return buckets, whole_state_dict(model), dist.get_process_group_ranks(holders)


def test_an_expert_bucket_is_sharded_over_the_ranks_that_hold_it() -> None:
    answers = run_ranks(_facts, 4)
    for rank, (buckets, weights, holders) in enumerate(answers):
        assert set(buckets) == {(1, 4, rank), (2, 2, rank // 2)}
        assert holders == [rank % 2, rank % 2 + 2]
        for name, value in weights.items():
            assert torch.equal(value, answers[0][1][name]), name


def _rank_without_gradients(stage: int) -> list[float]:
    """One rank does not use a layer that the others use: no rank hangs, and the mean is correct."""
    torch.manual_seed(0)
    model = nn.ModuleList([MoE(4, ExpertMLP(4, 4), 2, drop_tokens=False), nn.Linear(4, 4), nn.Linear(4, 4)]).double()
    distribute(model, zcomm.consecutive_group(2))
    policy = ZeroPolicy(stage=stage, bucket_numel=1, unit_numel=1, persist_numel=17)  # the two stay whole
    partition = zpartition.shard(model, policy=policy)
    x = torch.ones(3, 4, dtype=torch.float64)
    found = []
    for _ in range(2):
        with partition.micro_step():
            y = model[2](x) if zcomm.group_rank() == 0 else model[1](x)
            y = model[0](y)[0]
            y.sum().backward()
        partition.finish_gradients()
        total = torch.stack([g.abs().sum() for _, g in partition.named_gradients()]).sum()
        found.append(float(total))
        partition.zero_grad()
    return found


@pytest.mark.parametrize("stage", [2, 3])
def test_ranks_that_use_different_modules_before_the_experts_do_not_deadlock(stage: int) -> None:
    for first, second in run_ranks(_rank_without_gradients, 2, stage):
        assert first == pytest.approx(second)
        assert first > 0


def _tensor() -> tuple[list[float], list[float]]:
    """Two tensor ranks hold halves of each of two experts for four ranks' tokens; compared with all experts."""
    torch.manual_seed(0)
    expert = ExpertMLP(4, 6, "gelu", bias=True)
    model = nn.Sequential(MoE(4, expert, 2, k=2, drop_tokens=False, enable_expert_tensor_parallelism=True))
    model[0].gate.rule = type(model[0].gate.rule)(k=2, drops=False, second="best")
    model.double()
    data, tensor = zcomm.strided_group(2), zcomm.consecutive_group(2)
    x = torch.randn(2, 5, 4, dtype=torch.float64)[zcomm.group_rank(data)]

    def grads() -> dict[str, Tensor]:
        y, aux_loss, _ = model[0](x)
        names, params = zip(*model.named_parameters())
        return dict(zip(names, torch.autograd.grad(y.square().sum() + aux_loss, params)))

    expected = grads()
    for gradient in expected.values():
        zcomm.all_reduce(gradient, data)
    norm = torch.stack([gradient.square().sum() for gradient in expected.values()]).sum() / 4
    distribute(model, data, tensor=tensor)
    partition = zpartition.shard(model, policy=ZeroPolicy(stage=2), group=data)
    with partition.micro_step():
        y, aux_loss, _ = model[0](x)
        (y.square().sum() + aux_loss).backward()
    return [float(norm)], [float(norm_of(partition)) ** 2]


def _seeded_apart() -> tuple[list[int], bool]:
    """Parts of experts that were built under different seeds on each rank; and experts without tensor ranks."""
    torch.manual_seed(zcomm.group_rank())
    split, whole = (MoE(4, ExpertMLP(4, 6), 2, enable_expert_tensor_parallelism=True) for _ in range(2))
    before = split.experts.get_parameter("stacked.up.weight").detach().clone()
    zcomm.broadcast(before, source=0)
    distribute(split, zcomm.consecutive_group(1), tensor=torch.distributed.group.WORLD)
    distribute(whole, zcomm.consecutive_group(2))
    half = slice(3 * zcomm.group_rank(), 3 * zcomm.group_rank() + 3)
    shape = list(whole.experts.get_parameter("stacked.up.weight").shape)
    return shape, torch.equal(split.experts.get_parameter("stacked.up.weight"), before[:, half])


def test_tensor_ranks_are_those_of_the_argument_and_hold_parts_of_the_same_experts() -> None:
    assert run_ranks(_seeded_apart, 2) == [([1, 6, 4], True)] * 2


def test_tensor_ranks_compute_each_expert_together() -> None:
    for expected, found in run_ranks(_tensor, 4):
        assert found == pytest.approx(expected, rel=1e-12)


def _frozen(stage: int) -> bool:
    """Frozen experts stay those of their rank; a parameter and its edit are the same on all ranks."""
    model = MoELanguageModel()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, param in model.named_parameters():
        param.requires_grad_("blocks.1.moe.experts" not in name)
    distribute(model, zcomm.consecutive_group(2))
    policy = ZeroPolicy(stage=stage, unit_numel=700, persist_numel=20, bucket_numel=700)
    partition = zpartition.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), policy=policy)
    after = whole_state_dict(model)
    same = all(torch.equal(before[name], after[name]) for name in before)
    weight = model.blocks[0].moe.experts.get_parameter("stacked.up.weight")
    own = before["blocks.0.moe.experts.stacked.up.weight"][[0, 1] if zcomm.group_rank() % 2 == 0 else [2, 3]]
    same &= torch.equal(zpartition.safe_get_full_fp32_param(weight), own)
    with zpartition.gathered(weight, modifier_rank=2), torch.no_grad():
        weight.mul_(zcomm.group_rank() // 2 + 1)  # ranks 2 and 3 double theirs
    name = "blocks.0.moe.experts.stacked.up.weight"
    same &= torch.equal(whole_state_dict(model)[name], 2 * before[name])
    partition.close()
    return same


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_frozen_experts_do_not_change_and_single_ones_are_read_and_edited(stage: int) -> None:
    assert run_ranks(_frozen, 4, stage) == [True] * 4


def _recomputed(stage: int) -> tuple[list[float], list[float]]:
    """Gradient norms of recomputed blocks, whose tokens are sent again; and an evaluation."""
    found = []
    for again in (False, True):
        model = MoELanguageModel()
        if again:
            for block in model.blocks:
                block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        distribute(model, None)
        policy = ZeroPolicy(stage=stage, unit_numel=700, persist_numel=20, bucket_numel=700, max_live_numel=0)
        partition = zpartition.shard(model, policy=policy)
        tokens = batches(2, 1)[0, 0, zcomm.group_rank()]
        with partition.micro_step():
            model(tokens).backward()
        partition.finish_gradients()
        found.append([float(gradient.norm()) for _, gradient in partition.named_gradients()])
        with torch.no_grad():
            found[-1].append(float(model.eval()(tokens)))
        partition.close()
    return found[0], found[1]


@pytest.mark.parametrize("stage", [2, 3])
def test_recomputed_blocks_give_the_same_gradients(stage: int) -> None:
    for plain, again in run_ranks(_recomputed, 2, stage):
        assert again == pytest.approx(plain, rel=1e-12)


def _few_bits() -> list[float]:
    """ZeRO++ with experts: quantization for all parameters, hpZ and hops for those of all ranks; the loss falls."""
    model = MoELanguageModel().float()
    distribute(model, zcomm.consecutive_group(2))
    small = {"unit_numel": 700, "persist_numel": 20, "max_live_numel": 0}
    bits = {"weight_bits": 8, "gradient_bits": 8, "secondary_group_size": 2, "gradient_hop_size": 2}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=3, **small, **bits))
    losses = []
    for _ in range(6):
        with partition.micro_step():
            loss = model(batches(4, 1)[0, 0, zcomm.group_rank()])
            loss.backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
        losses.append(float(loss.detach()))
    partition.close()
    return losses


def test_quantized_communication_works_with_experts() -> None:
    for losses in run_ranks(_few_bits, 4):
        assert losses[-1] < losses[0] - 0.3
