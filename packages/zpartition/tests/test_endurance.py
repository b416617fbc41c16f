"""Dropped partitions leave no memory or hooks behind; ranks that call different modules get an error."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import zcomm
import zpartition
from zcomm.testing import run_ranks
from zpartition import ZeroPolicy


def count_resources() -> dict[str, int]:
    """Threads, open files and shared mappings of this process; resident memory in KiB."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "mappings": maps.count("memfd:"),
        "kib": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


def train_once(stage: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    policy = ZeroPolicy(stage=stage, unit_numel=20_000, persist_numel=0, max_live_numel=0)
    partition = zpartition.shard(model, optimizer, policy=policy)
    for _ in range(2):
        with partition.micro_step():
            model(torch.ones(2, 64)).sum().backward()
        partition.finish_gradients()
        partition.apply(optimizer.step)
        partition.zero_grad()
    partition.close()
    return model


def _comes_and_goes(stage: int) -> tuple[dict[str, int], dict[str, int], int]:
    for _ in range(10):
        train_once(stage)
    before = count_resources()
    for _ in range(50):
        model = train_once(stage)
    hooks = sum(
        len(hooked)
        for module in model.modules()
        for hooked in (
            module._forward_hooks, module._forward_pre_hooks, module._state_dict_hooks,
            module._state_dict_pre_hooks, module._load_state_dict_pre_hooks, module._load_state_dict_post_hooks,
        )
    )  # fmt: skip
    hooks += sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters())  # type: ignore[attr-defined]
    del model
    return before, count_resources(), hooks


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_fifty_partitions_leave_nothing_behind(stage: int) -> None:
    for before, after, hooks in run_ranks(_comes_and_goes, 2, stage):
        assert hooks == 0
        assert {key: after[key] for key in ("threads", "files", "mappings")} == {
            key: before[key] for key in ("threads", "files", "mappings")
        }
        assert after["kib"] - before["kib"] < 4096


class Detour(nn.Module):
    """Four layers, of which one rank skips the third."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if not (index == 2 and zcomm.group_rank() == 1):
                x = layer(x)  # the line that is to blame
        return x


def _skips_a_layer() -> str:
    model = Detour()
    partition = zpartition.shard(
        model, policy=ZeroPolicy(stage=3, unit_numel=5000, persist_numel=0, max_live_numel=0)
    )
    with pytest.raises(zcomm.CollectiveFailed) as caught, partition.micro_step():
        model(torch.ones(2, 64)).sum().backward()
    partition.close(keep_weights=False)
    return str(caught.value)


def test_a_rank_that_skips_a_layer_is_named_with_module_and_line() -> None:
    for text in run_ranks(_skips_a_layer, 2):
        assert "layers.2" in text
        assert "layers.3" in text
        assert "rank 1" in text.lower()
        assert "test_endurance.py" in text
