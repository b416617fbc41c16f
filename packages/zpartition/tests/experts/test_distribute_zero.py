"""ZeRO over models with experts: stages x accumulation x expert-data ranks, against one process with all experts."""

from __future__ import annotations

import pytest

import zcomm
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy
from zpartition.testing.expert_models import CLIP, train, train_alone

Curve = tuple[list[float], list[float], float]


def policies(world_size: int, expert: int) -> dict[str, ZeroPolicy]:
    small = {"bucket_numel": 700, "unit_numel": 700, "persist_numel": 20, "max_live_numel": 0}
    found = {f"stage {stage}": ZeroPolicy(stage=stage, **small) for stage in (0, 1, 2, 3)}
    if (world_size, expert) == (4, 2):
        found["hybrid"] = ZeroPolicy(stage=3, shard_group_size=2, **small)
    return found


def curves(expert: int, accumulation: int) -> dict[str, Curve]:
    return {
        name: train(expert, accumulation, policy) for name, policy in policies(zcomm.group_size(), expert).items()
    }


@pytest.mark.parametrize(("world_size", "expert", "accumulation"), [(2, 2, 3), (4, 2, 1), (4, 4, 2)])
def test_losses_and_norms_equal_one_process(world_size: int, expert: int, accumulation: int) -> None:
    losses, norms, mark = train_alone(world_size, accumulation)
    for rank in run_ranks(curves, world_size, expert, accumulation):
        for name, (ours, our_norms, our_mark) in rank.items():
            assert ours == pytest.approx(losses, abs=1e-11), name
            assert our_norms == pytest.approx(norms, abs=1e-11), name
            assert our_mark == pytest.approx(mark, abs=1e-9), name
    assert min(norms) > CLIP  # clipping is exercised
