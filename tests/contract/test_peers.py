"""DDP and FSDP2 as oracles: the same model, seed and data, on the same number of ranks."""

from __future__ import annotations

import pytest
import torch
from contract_table.oracle import CLIP_NORM, make_optimizer
from contract_table.rows import ROWS
from contract_table.run import Case, Outcome, run_case
from contract_table.scenarios import SCENARIOS, Block, batches, last_batch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import zcomm
from zcomm.testing import end_ranks, run_ranks

STAGES = [row for row in ROWS if row.same_bits and 2 in row.worlds]


def ours() -> list[Outcome]:
    return [run_case(Case(row, "plain", torch.float32, 1)) for row in STAGES]


def loop(module: nn.Module) -> list[float]:
    """Train with a plain loop around DDP or FSDP2; return this rank's losses, as in `Outcome`."""
    optimizer = make_optimizer(SCENARIOS["plain"], list(module.parameters()))
    losses = []
    for data in batches(zcomm.group_size(), 1):
        loss = module(data[0, zcomm.group_rank()])
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, module(last_batch()).item()]


def ddp() -> list[float]:
    return loop(DistributedDataParallel(SCENARIOS["plain"].model()))


def fsdp2() -> list[float]:
    mesh = init_device_mesh("cpu", (zcomm.group_size(),))
    model = SCENARIOS["plain"].model()
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh)
    return loop(fully_shard(model, mesh=mesh))


@pytest.mark.parametrize("peer", [ddp, fsdp2], ids=["DDP", "FSDP2"])
def test_each_ranks_losses_are_those_of_a_peer(peer) -> None:
    try:
        expected = run_ranks(peer, 2)
    finally:
        end_ranks()  # torch's global state of meshes and reducers ends with the processes
    for outcomes, losses in zip(run_ranks(ours, 2), expected):
        for row, outcome in zip(STAGES, outcomes):
            assert outcome.losses == pytest.approx(losses, rel=2e-6), row.name
