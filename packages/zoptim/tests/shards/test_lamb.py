"""LAMB's halves in torch, and LAMB over ranks by place_on_ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zoptim
from zoptim import Segment

SHAPES = [(20, 7), (30,), (), (9, 9)]
OPTIONS: dict[str, Any] = {"lr": 0.05, "weight_decay": 0.1}


@pytest.mark.parametrize("cuts", [[0], [0, 100], [0, 20, 150, 240]], ids=str)
@pytest.mark.parametrize(
    ("dtype", "more", "tolerance"),
    [
        (torch.float32, {}, 1e-6),
        (torch.float32, {"foreach": True}, 1e-6),
        (torch.float64, {"foreach": True, "maximize": True, "eps_inside_sqrt": True}, 1e-12),
        (torch.float32, {"foreach": True, "state_dtype": "bf16", "bias_correction": False}, 2**-7),
        (torch.bfloat16, {"foreach": True, "split_master": True}, 2**-7),
    ],
    ids=str,
)
def test_cut_tensors_step_as_whole_ones_with_and_without_kernels(
    cuts: list[int], dtype: torch.dtype, more: dict[str, Any], tolerance: float, lab: Any, team: Any
) -> None:
    crew = team(SHAPES, cuts)
    shards, optimizers = crew.train(lambda params: zoptim.LAMB(params, **OPTIONS, **more), range(3), dtype)
    whole = lab.make_params(SHAPES, dtype)
    lab.run(zoptim.LAMB(whole, **OPTIONS, **more), whole, range(3), SHAPES)
    lab.assert_near([torch.cat(shards)], [torch.cat([p.flatten() for p in whole])], tolerance, tolerance)
    assert crew.reduced == ([8] * 3 if len(cuts) > 1 else []), "one sum a step: two squares a tensor"
    assert all(optimizer.state[shard]["step"] == 3 for shard, optimizer in zip(shards, optimizers))


@pytest.mark.parametrize("more", [{}, {"foreach": True}], ids=["kernel", "torch"])
def test_found_inf_sends_nothing_and_changes_nothing(more: dict[str, Any], lab: Any, team: Any) -> None:
    crew = team(SHAPES, [0, 100])
    shards, optimizers = crew.train(lambda params: zoptim.LAMB(params, **OPTIONS, **more), range(2))
    before = [lab.snapshot(optimizer, [shard]) for optimizer, shard in zip(optimizers, shards)]
    for optimizer in optimizers:
        optimizer.found_inf = torch.ones(())
    crew.go_on(shards, optimizers, range(2, 3))
    for optimizer, shard, kept in zip(optimizers, shards, before):
        lab.assert_bitwise(lab.snapshot(optimizer, [shard]), kept)
    assert len(crew.reduced) == 2


def test_8bit_states_and_parts_without_ranks_raise(team: Any) -> None:
    shard: Tensor = torch.zeros(16, requires_grad=True)
    optimizer = zoptim.LAMB([("flat", shard)], state_dtype="8bit")
    with pytest.raises(ValueError, match=r"parameter group 0 of LAMB has state_dtype=\"8bit\", which needs"):
        team([(4, 4)], [0]).place_segments(0, optimizer, shard)
    with pytest.raises(ValueError, match="is a part of a tensor; give the segments of all ranks with place_on_ranks"):
        zoptim.LAMB([shard]).place_segments({shard: [Segment(0, (8, 8), 0, (0, 16))]})
