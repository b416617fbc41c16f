"""Experts are distributed as the config or the layers ask, or rejected before a message."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zcomm
import zengine
from zcomm.testing import run_ranks
from zpartition.experts import ExpertMLP, Experts, MoE, distribute
from zpartition.pipeline import PipelineModule

CONFIG = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}


def model(num_experts: int = 4, ep_size: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), MoE(4, ExpertMLP(4, 6), num_experts, ep_size), nn.Identity())


def _asked(expert: int, **others: Any) -> dict[str, Any]:
    return {**CONFIG, "expert_parallel": {"enabled": True, "autoep_size": expert}, **others}


def _numbers() -> list[tuple[list[int], int]]:
    found = []
    given = distribute_by_hand()
    for module, config in ((model(), _asked(2)), (model(ep_size=4), CONFIG), (model(), CONFIG), (given, CONFIG)):
        engine = zengine.initialize(model=module, config=config)[0]
        layer: Any = engine.module[1]
        found.append((list(layer.experts.own), engine.dp_world_size))
        engine.close()
    return found


def distribute_by_hand() -> nn.Module:
    module = model()
    distribute(module, zcomm.consecutive_group(2))
    return module


def test_the_config_or_the_layers_or_the_caller_share_experts_out() -> None:
    for rank, (by_config, by_layers, whole, by_hand) in enumerate(run_ranks(_numbers, 4)):
        half = [0, 1] if rank % 2 == 0 else [2, 3]
        assert by_config == (half, 4)
        assert by_layers == ([rank], 4)
        assert whole == ([0, 1, 2, 3], 4)
        assert by_hand == (half, 4)


def _refused() -> list[str]:
    log: list[zcomm.Record] = []
    found = []
    cases = [
        (model(3), _asked(2), ValueError),
        (nn.Linear(2, 2), _asked(2), ValueError),
        (model(), _asked(4), zengine.ConfigError),
        (model(ep_size=2), _asked(1), zengine.ConfigError),
    ]
    for module, config, kind in cases:
        with zcomm.traced(log), pytest.raises(kind) as raised:
            zengine.initialize(model=module, config=config)
        found.append(str(raised.value))
    assert not log
    return found


def test_what_does_not_fit_is_told_with_the_numbers_before_a_message() -> None:
    uneven, nothing, ranks, differ = run_ranks(_refused, 2)[0]
    assert "1.experts: 3 experts cannot be sharded evenly over 2 ranks: choose ep_size (autoep_size) from 1, 3" in (
        uneven
    )
    assert "no experts found in Linear to shard over 2 ranks" in nothing
    assert "expert_parallel.autoep_size = 4: expert=4 must divide the 2 ranks that sum gradients" in ranks
    assert "expert_parallel.autoep_size = 1: the model has 2 expert ranks" in differ


def _disagree() -> None:
    with pytest.raises(zengine.RanksDisagree, match=r"1\.gate\.weight \(6, 4\)"):
        zengine.initialize(model=model(4 if zcomm.group_rank() else 6), config=_asked(2))


def test_ranks_with_other_experts_are_told() -> None:
    run_ranks(_disagree, 2)


class Mixed(nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.moe = MoE(4, ExpertMLP(4, 6), 4, ep_size, drop_tokens=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.moe(x)[0])


def _layers(ep_size: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(4, 4), Mixed(ep_size)]


def _stages() -> list[tuple[list[float], int]]:
    """Only the second of two stages has experts, by its layers' ep_size or by the config."""
    found = []
    for ep_size, asked in ((2, {}), (1, {"expert_parallel": {"enabled": True, "autoep_size": 2}})):
        model = PipelineModule(_layers(ep_size), 2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
        with zengine.initialize(model=model, config={**CONFIG, **asked})[0] as engine:
            replica = engine.parts.groups.get_data_parallel_rank()
            losses = []
            for step in range(2):
                engine.train_batch(iter([_sample(step, replica)]))
                losses.append(engine.last_report.loss)
            sizes = [len(child.own) for child in model.modules() if isinstance(child, Experts)]
            found.append((losses, sum(sizes)))
    return found


def _sample(step: int, replica: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(10 * step + replica))
    return x, x.flip(0)


def test_a_stage_without_experts_goes_with_one_that_has_some() -> None:
    plain = nn.Sequential(*_layers(1))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    expected = []
    for step in range(2):
        losses = [nn.functional.mse_loss(plain(x), y) for x, y in (_sample(step, 0), _sample(step, 1))]
        mean = torch.stack(losses).mean()
        optimizer.zero_grad()
        mean.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        expected.append(mean.item())
    for rank, found in enumerate(run_ranks(_stages, 4)):
        for losses, num_experts in found:
            assert losses == pytest.approx(expected, rel=1e-4)
            assert num_experts == (0 if rank < 2 else 2)
