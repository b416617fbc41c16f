"""Memory and bytes of rounds before they begin, against live ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import Offload, Tier, ZeroPolicy
from zpartition.rounds import RoundPolicy, Rounds, plan_rounds

ROUNDS = RoundPolicy(sync_every=6, num_fragments=2)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))


def policy(states: Tier, dtype: torch.dtype) -> ZeroPolicy:
    return ZeroPolicy(stage=1, offload=Offload(states=states), master_dtype=dtype)


def _live(states: Tier, dtype: torch.dtype) -> dict[str, int]:
    """One group of two ranks: its rounds exchange nothing, and hold what others hold."""
    made = model().to(dtype)
    partition = zpartition.shard(made, torch.optim.AdamW(made.parameters()), policy=policy(states, dtype))
    groups = [torch.distributed.new_group([rank]) for rank in range(zcomm.group_size())]
    rounds = Rounds(partition, groups[zcomm.group_rank()], ROUNDS)
    partition.held_beside = rounds.ledger
    return {owner: size for owner, size in partition.ledger().items() if "outer" in owner}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("states", [Tier.DEVICE, Tier.HOST])
def test_the_outer_state_is_where_the_masters_are(states: Tier, dtype: torch.dtype) -> None:
    found = plan_rounds(
        model().to(dtype),
        ROUNDS,
        num_groups=1,
        policy=policy(states, dtype),
        world_size=2,
        optimizer=torch.optim.AdamW,
    )
    live = run_ranks(_live, 2, states, dtype)[0]
    assert live == {**found.device, **found.elsewhere}
    assert bool(found.elsewhere) == (states is Tier.HOST)
    assert min(live.values()) > 0
    assert (found.flows, found.peak_bytes) == ((), 0), "one group sends nothing"


def test_bytes_follow_from_groups_fragments_and_bits() -> None:
    given = {"policy": ZeroPolicy(stage=0), "world_size": 1, "optimizer": torch.optim.AdamW}
    numel = sum(param.numel() for param in model().parameters())
    whole = plan_rounds(model(), RoundPolicy(sync_every=50), num_groups=4, **given)
    assert whole.peak_bytes == 2 * 4 * numel * 3 // 4 <= whole.plain_bytes  # buckets are padded
    assert whole.flows[0].num_bytes == round(whole.peak_bytes / 50)
    parts = plan_rounds(model(), RoundPolicy(sync_every=50, num_fragments=4), num_groups=4, **given)
    assert parts.peak_bytes == whole.peak_bytes // 4
    assert parts.flows[0].num_bytes == whole.flows[0].num_bytes
    coded = plan_rounds(model(), RoundPolicy(sync_every=50, bits=4), num_groups=4, **given)
    assert 6 < whole.peak_bytes / coded.peak_bytes < 8
