"""Bytes that a rank sends in an optimizer step, before anything is sent: from a model on "meta" and a policy.

On a ring of W ranks an all-reduce of n bytes sends 2 n (W - 1) / W bytes through each rank; a reduce-scatter or an
all-gather sends half of that.  In units of one all-reduce of all gradients ("1x", the cost of data parallelism)
stages 0, 1 and 2 send 1x and stage 3 at most 1.5x (Rajbhandari et al. 2020, section 7).  Accumulation multiplies what
is sent in every micro-step, and ZeRO++ divides it (Wang et al. 2023).

Messages are counted one by one from the layout that a partition would have.  Two-hop messages are counted on each
hop, because the links differ.  Buffers, overflow flags and other small values are not included.

An optimizer with compressed communication (compression.py) has two phases, which are planned apart: first gradients
are reduced as for any optimizer, later ranks exchange a bit for each element instead.

[Note: number of gathers] At stage 3 a unit is gathered for the forward pass and, unless it can stay whole until then,
again for the backward pass.  By default only the last ones stay (residence.py).  With `policy.max_live_numel` a unit
may stay while all whole units fit into it and at most `policy.max_reuse_numel` elements are used before its next use:
of a model slightly over the limit nearly everything stays, and only the rest is gathered twice.  Prefetched units
count as well.  These are the rules of unshard.py, applied to counts.

Modules are assumed to run once each, in definition order, and backward in reverse order of return: parameters that a
module holds itself beside child units are used at its end, as a head is.  A model that deviates (a weight read by
another module's code, a layer called twice) gathers more.  Embedding lookups need no weights in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import attrs
import torch
from torch import nn
from torch.nn import Parameter

import zcomm
from zpartition.bucket_exchange import sign_layout
from zpartition.estimate.compression import is_compressed
from zpartition.gradients.reduce import GRADIENT_BLOCK, reduce_at
from zpartition.layout.layout import Bucket, Layout
from zpartition.layout.plan_layouts import plan_layouts
from zpartition.layout.policy import ReduceAt, ZeroPolicy
from zpartition.layout.residence import Residence, residence, unit_numels
from zpartition.layout.units import encloses
from zpartition.ownership import named_groups
from zpartition.state.optimizer_state import block_numel
from zpartition.weights.gather_sources import WEIGHT_BLOCK
from zpartition.weights.storage import piece_numel

__all__ = ["Flow", "TrafficPlan", "count_gathers", "embedding_only_units", "plan_traffic"]

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


@attrs.frozen
class Flow:
    """Messages of one kind in one optimizer step."""

    what: str  # "gradients, reduce-scatter"
    among: int  # ranks that take part in each
    num_messages: int
    num_bytes: int  # through one rank, one direction


@attrs.frozen
class TrafficPlan:
    """Messages that one rank sends in an optimizer step."""

    flows: tuple[Flow, ...]  # of a compressed optimizer: of a step that reduces gradients
    unit_bytes: int  # 1x: one all-reduce of all gradients over all ranks, in the dtype on the wire
    compressed: tuple[Flow, ...] = ()  # of a step that sends compressed momenta instead; empty for other optimizers

    @property
    def total_bytes(self) -> int:
        """Sum over all kinds."""
        return sum(flow.num_bytes for flow in self.flows)

    @property
    def share(self) -> float:
        """Total in units of one all-reduce of all gradients; 0 for a single rank."""
        return self.total_bytes / self.unit_bytes if self.unit_bytes else 0.0

    @property
    def compressed_bytes(self) -> int:
        """Sum over all kinds of a step that sends compressed momenta; 0 for other optimizers."""
        return sum(flow.num_bytes for flow in self.compressed)


def plan_traffic(
    module: nn.Module,
    *,
    policy: ZeroPolicy,
    world_size: int,
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None,
    num_backwards: int = 1,
) -> TrafficPlan:
    """Plan the traffic of a step over `world_size` ranks; the arguments are those of `plan`.

    >>> import torch, zpartition
    >>> model = torch.nn.Linear(1024, 1024)
    >>> traffic = zpartition.plan_traffic(model, policy=zpartition.ZeroPolicy(stage=2), world_size=8)
    >>> [flow.what for flow in traffic.flows], round(traffic.share, 3)
    (['gradients, reduce-scatter', 'updated weights, all-gather'], 1.0)
    """
    params = [param for param in module.parameters() if param.requires_grad]
    made = None if optimizer is None or not params else optimizer(params)
    trained, frozen = plan_layouts(module, named_groups(module, made), policy, world_size, block_numel(made))
    gradients = sum(bucket.numel * policy.wire_for(bucket).itemsize for bucket in trained.buckets)
    rounds = 1 if reduce_at(policy, trained) is ReduceAt.BOUNDARY else num_backwards
    flows = [
        *_gradient_flows(trained, policy, rounds),
        *_update_flows(trained, policy),
        *_unit_flows(module, trained, frozen, policy, num_backwards),
    ]
    return TrafficPlan(
        _that_send(flows),
        round(_all_reduced(gradients, trained.world_size)),
        _that_send(_compressed_flows(trained, policy, made)),
    )


def _that_send(flows: Iterable[Flow]) -> tuple[Flow, ...]:
    return tuple(flow for flow in flows if flow.num_bytes)


def _compressed_flows(layout: Layout, policy: ZeroPolicy, optimizer: torch.optim.Optimizer | None) -> list[Flow]:
    """Messages of a step that sends compressed momenta: two phases, and exact means for groups with `non_freeze`.

    Nothing for other optimizers, and at stages 2 and 3, where no rank has a whole gradient to compress.
    """
    ranks = layout.world_size
    if optimizer is None or not is_compressed(optimizer) or policy.stage > 1 or ranks == 1:
        return []
    is_exact = [bool(group.get("non_freeze")) for group in optimizer.param_groups]
    exact = [bucket for bucket in layout.buckets if is_exact[bucket.group]]
    rest = [bucket for bucket in layout.buckets if not is_exact[bucket.group]]
    signs = sign_layout(rest, ranks, fused=bool(getattr(optimizer, "fuses_message", False)))
    sent = round(_gathered(signs.latest_bytes, ranks)) if rest else 0
    whole = sum(bucket.numel for bucket in exact) * torch.float32.itemsize
    return [
        Flow("compressed momenta, all-to-all", ranks, 1, sent),
        Flow("compressed momenta, all-gather", ranks, 1, sent),
        Flow("exact means of gradients, all-reduce", ranks, len(exact), round(_all_reduced(whole, ranks))),
        *_update_flows(layout, policy),
    ]


def _gradient_flows(layout: Layout, policy: ZeroPolicy, rounds: int) -> list[Flow]:
    """Reductions of gradients."""
    shards, copies = layout.num_shards, layout.world_size // layout.num_shards
    count = rounds * len(layout.buckets)
    payload = rounds * sum(bucket.numel * policy.wire_for(bucket).itemsize for bucket in layout.buckets)
    if shards == 1:
        return [
            Flow("gradients, all-reduce", layout.world_size, count, round(_all_reduced(payload, layout.world_size)))
        ]
    found = _few_bits(layout, policy, rounds) if policy.gradient_bits else []
    found = found or [Flow("gradients, reduce-scatter", shards, count, round(_gathered(payload, shards)))]
    if copies > 1:
        found.append(Flow("sums of copies, all-reduce", copies, count, round(_all_reduced(payload / shards, copies))))
    return found


def _few_bits(layout: Layout, policy: ZeroPolicy, rounds: int) -> list[Flow]:
    """Quantized gradients: one hop, or inside runs of consecutive ranks and then between them (ZeRO++, qgZ)."""
    code = zcomm.BlockCode(bits=policy.gradient_bits, block=GRADIENT_BLOCK)
    payload = rounds * sum(b.num_shards * code.num_bytes(b.span_numel) for b in layout.buckets)
    count, shards, run = rounds * len(layout.buckets), layout.num_shards, policy.gradient_hop_size
    what = f"gradients in {policy.gradient_bits} bits"
    if not 1 < run < shards:
        return [Flow(what, shards, count, round(_gathered(payload, shards)))]
    nodes = shards // run
    return [
        Flow(f"{what}, inside nodes", run, count, round(_gathered(payload, run))),
        Flow(f"{what}, between nodes", nodes, count, round(_gathered(payload / run, nodes))),
    ]


def _update_flows(layout: Layout, policy: ZeroPolicy) -> list[Flow]:
    """All-gathers of weights that were updated in shards and are whole on every rank."""
    whole = [bucket for bucket in layout.buckets if bucket.unit is None and bucket.num_shards > 1]
    payload = sum(bucket.numel * bucket.dtype.itemsize for bucket in whole)
    count = sum(-(-bucket.span_numel // piece_numel(bucket, policy.gather_numel)) for bucket in whole)
    return [
        Flow("updated weights, all-gather", layout.num_shards, count, round(_gathered(payload, layout.num_shards)))
    ]


def _unit_flows(module: nn.Module, trained: Layout, frozen: Layout, policy: ZeroPolicy, times: int) -> list[Flow]:
    """Stage 3: gathers for each forward, and for each backward where the unit could not stay."""
    buckets = [bucket for bucket in (*trained.buckets, *frozen.buckets) if bucket.unit is not None]
    if not buckets:
        return []
    gathers = _gathers(module, buckets, policy)
    sizes = {bucket: _weight_bytes(bucket, bucket in trained.buckets, policy) for bucket in buckets}
    counts = {bucket: times * gathers[bucket.unit or ""] for bucket in buckets}
    shards, node = buckets[0].num_shards, policy.secondary_group_size
    if not policy.keeps_secondary(shards):
        payload = sum(counts[bucket] * size for bucket, size in sizes.items())
        return [Flow("weights of units, all-gather", shards, sum(counts.values()), round(_gathered(payload, shards)))]
    first, again = sum(sizes.values()), sum((counts[b] - 1) * b.numel * b.dtype.itemsize for b in buckets)
    return [
        Flow("weights of units, first all-gather", shards, len(buckets), round(_gathered(first, shards))),
        Flow(
            "weights of units, again in a node",
            node,
            sum(counts.values()) - len(buckets),
            round(_gathered(again, node)),
        ),
    ]


def _gathers(module: nn.Module, buckets: list[Bucket], policy: ZeroPolicy) -> Mapping[str, int]:
    """Count the gathers of each unit in a micro-step, by name."""
    once = embedding_only_units(module, {slot.name: bucket.unit or "" for bucket in buckets for slot in bucket.slots})
    return count_gathers(unit_numels(module, buckets), policy, once, num_shards=buckets[0].num_shards)


def _weight_bytes(bucket: Bucket, is_trained: bool, policy: ZeroPolicy) -> int:
    bits = policy.weight_bits_of(is_trained=is_trained)
    if not bits:
        return bucket.numel * bucket.dtype.itemsize
    return bucket.num_shards * zcomm.BlockCode(bits=bits, block=WEIGHT_BLOCK).num_bytes(bucket.span_numel)


def count_gathers(
    units: Mapping[str, int], policy: ZeroPolicy, once: Collection[str] = (), *, num_shards: int
) -> Counter[str]:
    """Count gathers by unit in one micro-step, in the steady state.

    units: elements by name, in order of use; each has `num_shards` shards.
    once: units that backward does not use.
    """
    events = list(_calls(units))
    backward = [name for name, is_entered in reversed(events) if not is_entered and name not in once]
    forward = _ForwardSimulation(units, policy, residence(units, policy, num_shards), [*units, *backward])
    for name, is_entered in events:
        if is_entered:
            forward.enter(name)
        else:
            forward.leave(name)
    return forward.gathers + Counter(name for name in backward if name not in forward.whole)


def _calls(units: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (unit, True) where its module is entered and (unit, False) where it is left; parents enclose children."""
    running: list[str] = []  # from outside inwards
    for name in units:
        while running and not encloses(running[-1], name):
            yield running.pop(), False
        yield name, True
        running.append(name)
    yield from ((name, False) for name in reversed(running))


def embedding_only_units(module: nn.Module, unit_of: Mapping[str, str]) -> frozenset[str]:
    """Return the units that hold only embedding weights; `unit_of`: unit by parameter name."""
    others = {
        id(param)
        for child in module.modules()
        if not isinstance(child, _LOOKUPS)
        for param in child.parameters(recurse=False)
    }
    found = dict.fromkeys(unit_of.values(), True)
    for name, param in module.named_parameters():
        if name in unit_of and id(param) in others:
            found[unit_of[name]] = False
    return frozenset(unit for unit, holds_lookups_alone in found.items() if holds_lookups_alone)


@attrs.define(eq=False)
class _ForwardSimulation:
    """Units that are whole during a forward pass."""

    units: Mapping[str, int]
    policy: ZeroPolicy
    limits: Residence
    order: list[str]  # of uses, backward included
    whole: set[str] = attrs.field(factory=set)
    gathers: Counter[str] = attrs.field(factory=Counter)
    live_numel: int = 0  # elements that are whole
    position: int = 0  # in the order, of the next use

    def enter(self, name: str) -> None:
        """Use a unit, and prefetch."""
        self._gather(name)
        self.position += 1
        ahead, most = 0, self.policy.prefetch_numel
        for upcoming in self.order[self.position :] if most else ():
            if ahead and ahead + self.units[upcoming] > most:
                return
            ahead += self.units[upcoming]
            if upcoming not in self.whole:
                if self.live_numel + self.units[upcoming] > self.limits.ahead_numel:
                    return
                self._gather(upcoming)

    def leave(self, name: str) -> None:
        """Reshard a unit, unless it may stay, after its module returned."""
        may_stay = self.live_numel <= self.limits.stay_numel and self._distance(name) <= self.policy.max_reuse_numel
        if not may_stay and not (self.live_numel <= self.limits.next_numel and self._is_next(name)):
            self.whole.discard(name)
            self.live_numel -= self.units[name]

    def _is_next(self, name: str) -> bool:
        upcoming = (each for each in self.order[self.position :] if each == name or each not in self.whole)
        return next(upcoming, None) == name

    def _gather(self, name: str) -> None:
        if name not in self.whole:
            self.whole.add(name)
            self.gathers[name] += 1
            self.live_numel += self.units[name]

    def _distance(self, name: str) -> int:
        upcoming = self.order[self.position :]
        until = upcoming.index(name) if name in upcoming else len(upcoming)
        return sum(self.units[each] for each in upcoming[:until])


def _gathered(num_bytes: float, num_ranks: int) -> float:
    """Bytes through a rank for an all-gather or reduce-scatter of `num_bytes` in total."""
    return num_bytes * (num_ranks - 1) / num_ranks


def _all_reduced(num_bytes: float, num_ranks: int) -> float:
    return 2 * _gathered(num_bytes, num_ranks)
