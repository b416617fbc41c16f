"""Memory and traffic of rounds of local steps, before anything is allocated or sent; see exchange.py.

Memory follows from the layout and is exact on rank 0 of a group; other ranks differ by padding at most.  Messages are
those of a ring, as in estimate/traffic.py: per step on average, and the most in one step, which is one fragment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import torch
from torch import nn
from torch.nn import Parameter

import zcomm
from zpartition.estimate.traffic import Flow
from zpartition.layout.plan_layouts import plan_layouts
from zpartition.layout.policy import Tier, ZeroPolicy
from zpartition.ownership import named_groups
from zpartition.rounds.exchange import RoundPolicy, owner_names
from zpartition.rounds.fragments import plan_fragments
from zpartition.state.optimizer_state import block_numel

__all__ = ["RoundsPlan", "plan_rounds"]


@attrs.frozen(kw_only=True)
class RoundsPlan:
    """Outer state of one rank, and what it sends to the ranks of other groups."""

    device: Mapping[str, int]  # bytes by owner, with the names of `Rounds.ledger()`
    elsewhere: Mapping[str, int]  # the same, of states on the host
    flows: tuple[Flow, ...]  # of an average step
    peak_bytes: int  # the most that is sent in one step
    plain_bytes: int  # an all-reduce of all gradients over all ranks of all groups, in the dtype on the wire


def plan_rounds(
    module: nn.Module,
    rounds: RoundPolicy,
    *,
    num_groups: int,
    policy: ZeroPolicy,
    world_size: int,
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None,
) -> RoundsPlan:
    """Plan the rounds of `num_groups` groups of `world_size` ranks each; the other arguments are those of `plan`."""
    params = [param for param in module.parameters() if param.requires_grad]
    made = None if optimizer is None or not params else optimizer(params)
    trained, _ = plan_layouts(module, named_groups(module, made), policy, world_size, block_numel(made))
    names = [name for name, param in module.named_parameters() if param.requires_grad]
    pieces = [tuple(bucket.pieces(0)) for bucket in trained.buckets]
    numels = [sum(s.numel for s in own) for own in plan_fragments(pieces, names, rounds.num_fragments)]
    is_wide = any(policy.master_for(bucket.dtype) == torch.float64 for bucket in trained.buckets)
    itemsize = torch.float64.itemsize if is_wide else torch.float32.itemsize
    tiers = policy.offload.place([bucket.span_numel for bucket in trained.buckets])
    is_on_host = any(tier is not Tier.DEVICE for tier in tiers)
    owners = dict(zip(owner_names(is_on_host), (sum(numels) * itemsize,) * 2 + (max(numels, default=0) * itemsize,)))
    sent = [_sent_bytes(numel, itemsize, num_groups, rounds) for numel in numels]
    messages = len(numels) * (2 if rounds.bits else 1)
    what = f"outer gradients{f' in {rounds.bits} bits' if rounds.bits else ''}, mean of {rounds.sync_every} steps"
    flow = Flow(what, num_groups, -(-messages // rounds.sync_every), round(sum(sent) / rounds.sync_every))
    ranks = num_groups * world_size
    gradients = sum(bucket.numel * policy.wire_for(bucket).itemsize for bucket in trained.buckets)
    return RoundsPlan(
        device={} if is_on_host else owners,
        elsewhere=owners if is_on_host else {},
        flows=(flow,) if flow.num_bytes else (),
        peak_bytes=max(sent, default=0),
        plain_bytes=round(2 * gradients * (ranks - 1) / ranks),
    )


def _sent_bytes(numel: int, itemsize: int, num_groups: int, rounds: RoundPolicy) -> int:
    """Bytes through a rank for the exchange of a fragment."""
    if not rounds.bits:
        return round(2 * numel * itemsize * (num_groups - 1) / num_groups)
    code = zcomm.BlockCode(bits=rounds.bits)
    part = -(-numel // (num_groups * code.block)) * code.block
    return 2 * (num_groups - 1) * code.num_bytes(part)
