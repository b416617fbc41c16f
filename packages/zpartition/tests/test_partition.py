"""Contract table of partitions: every stage equals one process; messages and memory are counted."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Averaging, ReduceAt, ZeroPolicy

STAGES = (0, 1, 2, 3)
NUM_STEPS = 6


def policy_of(stage: int) -> ZeroPolicy:
    """Several buckets, or several units, for a small model."""
    return ZeroPolicy(stage=stage, bucket_numel=2000, unit_numel=2000, persist_numel=20, max_live_numel=0)


class Net(nn.Module):
    """Tied, frozen, sometimes unused and never used parameters, a scalar, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 24)
        self.body = nn.Sequential(nn.Linear(24, 64), nn.Tanh(), nn.Linear(64, 24))
        self.sometimes = nn.Linear(24, 24)
        self.never = nn.Linear(3, 3)
        self.frozen = nn.Linear(24, 24)
        self.frozen.requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(24, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("table", torch.arange(24.0))

    def forward(self, tokens: torch.Tensor, *, detour: bool = False) -> torch.Tensor:
        hidden = self.embed(tokens) + self.frozen(self.table)
        hidden = hidden + self.gain * self.body(hidden)
        if detour:
            hidden = hidden + self.sometimes(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), tokens.flatten())


def batches(world_size: int, accumulation: int):
    """Tokens of (step, micro-step, rank); the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, 11, (NUM_STEPS, accumulation, world_size, 4, 6), generator=generator)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [p for p in model.parameters() if p.requires_grad]
    vectors = [p for p in trainable if p.dim() < 2]
    matrices = [p for p in trainable if p.dim() >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=3e-2)


def train_alone(world_size: int, accumulation: int, make=make_optimizer, every: int = 1) -> dict[str, torch.Tensor]:
    """The oracle: one process that sees every rank's data; plain PyTorch. The detour is taken every `every` steps."""
    model = Net()
    optimizer = make(model)
    for step, data in enumerate(batches(world_size, accumulation)):
        for micro in data:
            for tokens in micro:
                (model(tokens, detour=step % every == 0) / accumulation / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def train(policy: ZeroPolicy, accumulation: int, make=make_optimizer, every: int = 1) -> dict[str, torch.Tensor]:
    """One rank of the partitioned run."""
    rank, world_size = zcomm.group_rank(), zcomm.group_size()
    model = Net()
    optimizer = make(model)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for step, data in enumerate(batches(world_size, accumulation)):
        for index, micro in enumerate(data):
            with partition.micro_step(is_last=index == accumulation - 1):
                (model(micro[rank], detour=step % every == 0) / accumulation).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    partition.close()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def make_momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9, weight_decay=0.01
    )


def curves(policies: list[ZeroPolicy], accumulation: int) -> list[dict[str, torch.Tensor]]:
    return [train(policy, accumulation) for policy in policies]


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_stage_trains_like_one_process_and_stages_agree_bit_for_bit(world_size, accumulation):
    policies = [policy_of(stage) for stage in STAGES]
    expected = train_alone(world_size, accumulation)
    for results in run_ranks(curves, world_size, policies, accumulation):
        for found in results:
            assert_same(found, expected)
            assert torch.equal(found["never.weight"], expected["never.weight"])
        for found in results[1:]:
            assert all(torch.equal(found[name], results[0][name]) for name in expected)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Equal up to the rounding of fp32 sums in another order, which Adam's division by sqrt(v) magnifies."""
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=5e-6, atol=5e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_that_is_used_every_third_step_rests_in_between(world_size, stage):
    policy = policy_of(stage)
    expected = train_alone(world_size, 1, make_momentum, every=3)
    for found in run_ranks(train, world_size, policy, 1, make_momentum, every=3):
        assert_same(found, expected)


def test_reducing_once_a_step_trains_like_one_process_too():
    policies = [ZeroPolicy(stage=s, bucket_numel=2000, reduce_at=ReduceAt.BOUNDARY) for s in (0, 1)]
    policies.append(ZeroPolicy(stage=2, overlap=False))
    expected = train_alone(2, 3)
    for results in run_ranks(curves, 2, policies, 3):
        for found in results:
            assert_same(found, expected)


@pytest.mark.parametrize(
    "averaging", [Averaging(prescale=True), Averaging(predivide=2.0), Averaging(predivide=4.0)], ids=str
)
def test_where_the_division_happens_does_not_matter_for_powers_of_two(averaging):
    both = [ZeroPolicy(stage=2, bucket_numel=2000), ZeroPolicy(stage=2, bucket_numel=2000, averaging=averaging)]
    (default, other), _ = run_ranks(curves, 2, both, 1)
    assert all(torch.equal(default[name], other[name]) for name in default)


def _ranks_disagree_on_usage(policy: ZeroPolicy) -> dict[str, torch.Tensor]:
    """Rank 0 takes the detour, rank 1 does not: both must reduce the same buckets in the same order."""
    model = Net()
    optimizer = make_optimizer(model)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for data in batches(2, 1):
        with partition.micro_step():
            model(data[0, zcomm.group_rank()], detour=zcomm.group_rank() == 0).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("stage", [0, 1, 2])  # stage 3 gathers: all ranks have to call the same modules
def test_a_parameter_used_on_one_rank_only_gets_that_ranks_gradient(stage):
    model = Net()
    optimizer = make_optimizer(model)
    for data in batches(2, 1):
        for rank in range(2):
            (model(data[0, rank], detour=rank == 0) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_ranks_disagree_on_usage, 2, policy_of(stage)):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(found[name], tensor, rtol=5e-6, atol=5e-6)


def _unused_is_an_error() -> str:
    model = Net()
    optimizer = make_optimizer(model)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=1, ignore_unused=False))
    with partition.micro_step():
        model(batches(2, 1)[0, 0, zcomm.group_rank()]).backward()
    partition.finish_gradients()
    with pytest.raises(ValueError, match=r"no rank produced a gradient for never\.bias, never\.weight, sometimes"):
        partition.apply(optimizer.step, any_unused=partition.num_unused() > 0)
    return "told"


def test_unused_parameters_are_an_error_on_all_ranks_when_asked():
    assert run_ranks(_unused_is_an_error, 2) == ["told", "told"]


def _refuses(case: str) -> str:
    model = Net()
    optimizer = make_optimizer(model)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=1))
    if case == "twice":
        zpartition.shard(model, optimizer)
    if case == "moved":
        model.half()
        partition.apply(optimizer.step)
    if case == "unfrozen":
        model.frozen.requires_grad_(True)
        partition.apply(optimizer.step)
    if case == "foreign":
        zpartition.shard(nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0))
    if case == "plain backward after reduction":
        with partition.micro_step():
            model(batches(1, 1)[0, 0, 0]).backward()
        model(batches(1, 1)[0, 0, 0]).backward()
    return "accepted"


@pytest.mark.parametrize(
    ("case", "error", "message"),
    [
        ("twice", ValueError, r"parameter \S+ is partitioned already: close\(\) the partition"),
        ("moved", ValueError, r"parameter \S+ no longer lives in the partition's memory: module.to\(\)"),
        (
            "unfrozen",
            ValueError,
            r"parameter frozen\.weight requires a gradient, but was frozen .* admit_unfrozen",
        ),
        ("foreign", ValueError, r"parameter 0 of the optimizer's group 0, shape \(2, 2\), is not a parameter"),
        ("plain backward after reduction", RuntimeError, r"outside micro_step\(\) after the gradients"),
    ],
)
def test_mistakes_are_rejected_by_name(case, error, message):
    with pytest.raises(error, match=message):
        _refuses(case)


def test_a_plain_backward_needs_no_context():
    ours, theirs = Net(), Net()
    mine, other = make_optimizer(ours), make_optimizer(theirs)
    partition = zpartition.shard(ours, mine)
    for data in batches(1, 2):
        for micro in data:
            ours(micro[0], detour=True).backward()
            theirs(micro[0], detour=True).backward()
        partition.finish_gradients()
        partition.apply(mine.step, any_unused=True)
        partition.zero_grad()
        other.step()
        other.zero_grad()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_close_leaves_an_ordinary_module_that_can_be_partitioned_again():
    model = Net()
    partition = zpartition.shard(model, make_optimizer(model))
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    partition.close()
    partition.close()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert len({p.untyped_storage().data_ptr() for p in model.parameters()}) == len(list(model.parameters()))
    model(batches(1, 1)[0, 0, 0]).backward()
    assert model.gain.grad is not None
    zpartition.shard(model, make_optimizer(model)).close()


def test_sparse_gradients_are_added_to_the_flat_buffer():
    ours, theirs = nn.Embedding(10, 4, sparse=True), nn.Embedding(10, 4)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    partition = zpartition.shard(ours, optimizer)
    tokens = torch.tensor([1, 1, 7])
    for _ in range(2):
        ours(tokens).square().sum().backward()
    partition.finish_gradients()
    partition.apply(optimizer.step)
    for _ in range(2):
        theirs(tokens).square().sum().backward()
    torch.testing.assert_close(ours.weight.data, theirs.weight.data - theirs.weight.grad)


def _different_starts() -> list[torch.Tensor]:
    torch.manual_seed(zcomm.group_rank())
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].running_mean.fill_(zcomm.group_rank())
    model[0].bias.requires_grad_(False)
    zpartition.shard(model, policy=ZeroPolicy(stage=2))
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def test_ranks_start_from_rank_0s_weights_frozen_parameters_and_buffers():
    first, second = run_ranks(_different_starts, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_a_model_without_parameters_to_train_is_a_partition_without_buckets():
    model = nn.Linear(2, 2)
    model.requires_grad_(False)
    partition = zpartition.shard(model)
    assert partition.finish_gradients() == []
    assert sorted(shard.name for shard in partition.shards()) == ["bias", "weight"]


class LateEmbedding(nn.Module):
    """Registered last, so in the first bucket, but its gradient comes last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.pooler = nn.Linear(64, 64)  # never used
        self.embed = nn.Embedding(64, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.embed(tokens)).square().mean()


def _late_embedding() -> tuple[int, int]:
    model = LateEmbedding()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer, policy=ZeroPolicy(stage=2, bucket_numel=64 * 65))
    for _ in range(3):
        with partition.micro_step():
            model(torch.arange(9)).backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    return partition.ledger()["buckets"], 4 * max(bucket.numel for bucket in partition.layout.buckets)


def test_once_the_order_is_learnt_three_buffers_serve_all_buckets():
    for buckets, largest in run_ranks(_late_embedding, 2):
        assert buckets <= 3 * largest


def _shaped_on_one_rank() -> torch.Tensor:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)])
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    partition = zpartition.shard(model, optimizer)
    for _ in range(3):
        with partition.micro_step():
            hidden = model[0](torch.ones(1, 8))
            (model[1](hidden) if zcomm.group_rank() == 0 else hidden).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step, any_unused=True)
        partition.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_replicas_stay_equal_under_an_optimizer_that_needs_shapes():
    first, second = run_ranks(_shaped_on_one_rank, 2)
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda p: torch.optim.RMSprop(p, lr=0.01, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.1),
    ],
    ids=["SGD", "RMSprop", "Adagrad"],
)
def test_a_parameter_that_is_first_used_in_the_third_step_has_no_past(make):
    ours, theirs = (nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    mine, other = make(ours.parameters()), make(theirs.parameters())
    partition = zpartition.shard(ours, mine)
    for step in range(5):
        for model in (ours, theirs):
            hidden = model[0](torch.ones(1, 4))
            (model[1](hidden) if step >= 2 else hidden).square().sum().backward()
        partition.finish_gradients()
        partition.apply(mine.step, any_unused=True)
        partition.zero_grad()
        other.step()
        other.zero_grad()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
