"""Weights gathered in few bits, and again from a few neighbours."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
import torch
from torch import Tensor, nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Partition, ZeroPolicy
from zpartition.memory.buffers import BufferPool
from zpartition.weights.gather_sources import WEIGHT_BLOCK, QuantizedShards, SecondaryShards

WORLD, NUM_STEPS, ACCUMULATION = 4, 3, 2
PLAIN = ZeroPolicy(stage=3, unit_numel=5000, persist_numel=0, max_live_numel=0, prefetch_numel=3000)
SECONDARY = attrs.evolve(PLAIN, secondary_group_size=2)
CODED = attrs.evolve(PLAIN, weight_bits=8)
BOTH = attrs.evolve(CODED, secondary_group_size=2)
FROZEN = attrs.evolve(PLAIN, frozen_weight_bits=8)


class Net(nn.Module):
    """Four units, one of them frozen; every one is gathered forward and backward."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64, dtype=dtype), nn.Linear(64, 16, dtype=dtype)
        self.inner = nn.Linear(64, 64, dtype=dtype)
        self.frozen = nn.Linear(64, 64, dtype=dtype).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.frozen(torch.tanh(self.first(x))))
        return self.last(torch.tanh(self.inner(hidden))) - x


def make(policy: ZeroPolicy, dtype: torch.dtype = torch.float32) -> tuple[Net, Partition, torch.optim.Optimizer]:
    model = Net(dtype)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.3, momentum=0.9)
    return model, zpartition.shard(model, optimizer, policy=policy), optimizer


def steps(
    model: Net, partition: Partition, optimizer: torch.optim.Optimizer, numbers: Iterable[int], looks: bool = False
) -> list[float]:
    losses = []
    for number in numbers:
        for index in range(ACCUMULATION):
            torch.manual_seed(1000 * number + 10 * index + zcomm.group_rank())
            x = torch.randn(8, 16).to(model.first.weight.dtype)
            with partition.micro_step(is_last=index == ACCUMULATION - 1):
                loss = model(x).float().pow(2).mean() / ACCUMULATION
                loss.backward()
            losses.append(loss.item())
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
        if looks:
            model.state_dict()
    return losses


def _trains(policy: ZeroPolicy, looks: bool) -> tuple[list[float], dict[str, Tensor], list[zcomm.Record], int]:
    model, partition, optimizer = make(policy)
    with zcomm.traced([]) as records:
        losses = steps(model, partition, optimizer, range(NUM_STEPS), looks)
    kept = partition.ledger()["secondary shards"]
    planned = zpartition.plan(Net(), policy=policy, world_size=WORLD)
    assert kept == planned.secondary_shards
    assert partition.ledger()["gathered units"] <= planned.gathered_units
    gathers = [record for record in records if record.label.startswith("weights of unit")]
    state = model.state_dict()
    partition.close()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items()), "the truth, exactly"
    return losses, state, gathers, kept


def _over(records: list[zcomm.Record], size: int) -> int:
    return sum(record.nbytes for record in records if record.group_size == size)


def _compares() -> None:
    losses, state, gathers, kept = _trains(PLAIN, False)
    assert kept == 0
    found_losses, found, found_gathers, kept = _trains(SECONDARY, False)
    assert found_losses == losses
    assert all(torch.equal(found[name], state[name]) for name in state), "bit for bit"
    by_label = {
        size: [r.label.removesuffix(", secondary") for r in found_gathers if r.group_size == size] for size in (2, 4)
    }
    assert by_label[4].count("weights of unit 'inner'") == NUM_STEPS, "once for each version"
    assert by_label[4].count("weights of unit 'frozen'") == 1, "its version never ends"
    assert by_label[2].count("weights of unit 'inner'") == (2 * ACCUMULATION - 1) * NUM_STEPS
    assert len(found_gathers) == len(gathers)
    assert _over(found_gathers, WORLD) < _over(gathers, WORLD) / 4
    assert _trains(SECONDARY, True)[0] == losses, "a run that looks at its weights goes on like one that does not"


def test_secondary_shards_change_nothing_but_the_way_of_the_bytes() -> None:
    run_ranks(_compares, WORLD)


def _encodes() -> None:
    losses, state, gathers, _ = _trains(PLAIN, False)
    coded_losses, coded_state, coded_gathers, _ = _trains(CODED, False)
    code = zcomm.BlockCode(bits=8, block=WEIGHT_BLOCK)
    assert len(coded_gathers) == len(gathers)
    assert _over(coded_gathers, WORLD) == _over(gathers, WORLD) * code.num_bytes(1024) / 4096
    assert coded_losses != losses
    torch.testing.assert_close(torch.tensor(coded_losses), torch.tensor(losses), rtol=0.02, atol=0)
    for name in state:
        torch.testing.assert_close(coded_state[name], state[name], rtol=0, atol=0.01)
    assert _trains(CODED, True)[0] == coded_losses
    both_losses, both_state, both_gathers, _ = _trains(BOTH, True)
    assert both_losses == coded_losses
    assert all(torch.equal(both_state[name], coded_state[name]) for name in state)
    assert _over([r for r in both_gathers if r.dtype == "uint8"], WORLD) < _over(coded_gathers, WORLD) / 3
    frozen_gathers = _trains(FROZEN, False)[2]
    assert {record.label for record in frozen_gathers if record.dtype == "uint8"} == {"weights of unit 'frozen'"}


def test_codes_save_bytes_and_training_stays_close() -> None:
    run_ranks(_encodes, WORLD)


def _shows(dtype_name: str) -> list[float]:
    """What a module computes with is off by no more than the bound, alike on all ranks, and not what people see."""
    dtype = getattr(torch, dtype_name)
    model, partition, optimizer = make(BOTH, dtype)
    steps(model, partition, optimizer, range(2))
    seen: list[Tensor] = []
    handle = model.inner.register_forward_hook(lambda module, _i, _o: seen.append(module.weight.detach().clone()))
    x = torch.zeros(1, 16, dtype=dtype)
    with torch.no_grad():
        model(x)
        with zpartition.gathered(model):
            truth = model.inner.weight.detach().clone()
            model(x)
            assert torch.equal(model.inner.weight, truth), "whoever calls it"
        model(x)
    handle.remove()
    first, inside, second = seen
    assert torch.equal(inside, truth)
    assert torch.equal(first, second)
    assert not torch.equal(first, truth)
    bound = truth.abs().max().double() * (zcomm.BlockCode(bits=8).relative_error + torch.finfo(dtype).eps)
    assert bool(((first.double() - truth.double()).abs() <= bound).all())
    assert torch.equal(model.state_dict()["inner.weight"], truth)
    partition.close()
    assert torch.equal(model.inner.weight.detach(), truth)
    return first.double().flatten().tolist()


@pytest.mark.parametrize("dtype_name", ["float32", "bfloat16"])
def test_modules_see_codes_and_people_the_truth(dtype_name: str) -> None:
    first, *others = run_ranks(_shows, WORLD, dtype_name)
    assert all(other == first for other in others)


def _changes(policy: ZeroPolicy) -> None:
    """An edit, a load and a write into shards end a version, of frozen units too."""
    model, partition, optimizer = make(policy)
    x = torch.ones(2, 16)

    def output() -> Tensor:
        with torch.no_grad():
            return model(x) + x

    def agrees() -> bool:
        with zpartition.gathered(model), torch.no_grad():
            exact = model(x) + x
        return torch.allclose(output(), exact, atol=0.05)

    assert not torch.equal(output(), torch.zeros(2, 16))
    with (
        zpartition.gathered([model.last.weight, model.last.bias, model.frozen.bias], modifier_rank=1),
        torch.no_grad(),
    ):
        model.last.weight.mul_(zcomm.group_rank())
        model.last.bias.fill_(2.0 + zcomm.group_rank())
        model.frozen.bias.fill_(zcomm.group_rank())
    assert agrees()
    torch.testing.assert_close(output().mean(), torch.tensor(3.0), atol=0.5, rtol=0)
    with pytest.raises(ValueError, match="edited inside gathered"), zpartition.gathered(model), torch.no_grad():
        model.frozen.bias.fill_(9.0 + zcomm.group_rank())
    assert agrees()
    with zpartition.gathered(model), torch.no_grad():
        model.frozen.bias[3] = 9.0  # in the part of one rank, and written by all
    assert agrees()
    with zpartition.gathered(model):
        assert float(model.frozen.bias[3]) == 9.0
    state = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(output(), torch.zeros(2, 16)), "zeros are exact"
    for shard in partition.shards():
        shard.tensor.fill_(0.01)
    partition.publish()
    with zpartition.gathered(model.frozen):
        assert torch.equal(model.frozen.weight, torch.full((64, 64), 0.01))
    assert agrees()
    assert output().mean().item() > 0
    steps(model, partition, optimizer, range(1))
    partition.close()


@pytest.mark.parametrize("policy", [SECONDARY, BOTH], ids=["secondary", "codes and secondary"])
def test_what_people_change_is_what_modules_see_next(policy: ZeroPolicy) -> None:
    run_ranks(_changes, WORLD, policy)


def test_groups_that_do_not_fit_are_rejected_and_alone_nothing_is_kept() -> None:
    with pytest.raises(ValueError, match="weight_bits"):
        ZeroPolicy(stage=3, weight_bits=5)
    model = nn.Linear(8, 8)
    partition = zpartition.shard(model, policy=attrs.evolve(BOTH, secondary_group_size=8))
    assert partition.ledger()["secondary shards"] == 0
    partition.close()


def _refuses() -> None:
    expected = "secondary_group_size 3 does not divide the 2 ranks that hold one copy: choose one of 2, or 0"
    with pytest.raises(ValueError, match=expected):
        zpartition.shard(nn.Linear(8, 8), policy=attrs.evolve(BOTH, secondary_group_size=3))


def test_a_size_that_does_not_divide_the_copy_is_rejected() -> None:
    run_ranks(_refuses, 2)


def test_codes_are_made_once_for_a_version() -> None:
    code, own, pool = zcomm.BlockCode(block=8), torch.ones(16), BufferPool(torch.device("cpu"))
    source = SecondaryShards(
        QuantizedShards(code, torch.empty(code.num_bytes(16), dtype=torch.uint8)), None, torch.empty(16)
    )
    for changed, is_stale, expected in ((1.0, False, 1.0), (2.0, False, 1.0), (3.0, True, 3.0)):
        own.fill_(changed)
        if is_stale:
            source.invalidate()
        for _ in range(2):
            whole = torch.empty(16)
            source.gather(whole, own, None, pool, "weights").wait()
            assert torch.equal(whole, torch.full((16,), expected))
    assert pool.num_made == 1
    assert source.kept_bytes == 16 * 4 + code.num_bytes(16)
