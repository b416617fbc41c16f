"""Memory of a rank by owner: planned before anything is allocated, or counted from live tensors.

    with torch.device("meta"):
        model = GPT(...)
    for stage in range(4):
        print(zpartition.plan(model, policy=ZeroPolicy(stage=stage), world_size=8, optimizer=torch.optim.AdamW))

Owners without a prefix are on the module's device.  Offloaded ones are named with their place: "host states", "pinned
masters" (page-locked, which the operating system cannot swap out), "disk states".  `plan` and `count_bytes`
use the same names.

`plan`.  Memory that lives between steps follows from the layout and is exact: weights, masters, accumulators,
optimizer states.  Memory that a step needs besides (gradient buckets in flight, gathered units) depends on the order
in which gradients arrive; the plan gives the maximum that the policy allows.  One exception: if a parameter that had
a gradient in one step has none in the next, its bucket waits, and the buckets behind it fill up.  Activations are not
included.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping

import attrs
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import zcomm
from zpartition.core import PartitionState
from zpartition.estimate.compression import compression_bytes, gradient_buffer_bytes
from zpartition.estimate.state_sizes import StateSizes
from zpartition.gradients.reduce import GRADIENT_BLOCK
from zpartition.gradients.reducer import IN_FLIGHT_LIMIT
from zpartition.layout.layout import Bucket, Layout
from zpartition.layout.plan_layouts import plan_layouts
from zpartition.layout.policy import Offload, Speculation, Tier, ZeroPolicy, step_groups
from zpartition.layout.residence import unit_numels
from zpartition.layout.selective import most_selected
from zpartition.memory.mover import IN_FLIGHT, NUM_STAGES
from zpartition.memory.placement import HostParams, ParamPlacement
from zpartition.ownership import named_groups
from zpartition.state.counts import is_large
from zpartition.state.optimizer_state import block_numel
from zpartition.weights.gather_sources import kept_bytes, most_gathered_bytes
from zpartition.weights.sharded import ShardedStorage

__all__ = ["MemoryPlan", "count_bytes", "plan"]

MIB = 2**20


@attrs.frozen
class MemoryPlan:
    """Bytes on one rank, by owner."""

    parameters: int  # weights between steps: whole, or this rank's shards
    masters: int  # full-precision copies, where the weights are narrower
    accumulators: int  # reduced gradients
    states: int  # optimizer states
    buckets: int  # gradients in flight, maximum
    gathered_units: int  # stage 3: gathered weights, maximum
    secondary_shards: int  # stage 3: sources of gathers other than the shards: quantized codes, secondary shards
    padding: int  # part of the above that no parameter uses
    gradient_errors: int = 0  # error feedback of quantized gradients
    compression: Mapping[str, int] = attrs.field(factory=dict)  # of 1-bit optimizers, by owner (compression.py)
    outer: Mapping[str, int] = attrs.field(factory=dict)  # of rounds of local steps, by owner (rounds/estimate.py)
    staging: int = 0  # offload on CUDA: copies on their way to or from the host, maximum
    columns: int = 0  # selective updates: masters, moments and positions of columns, maximum
    elsewhere: Mapping[str, int] = attrs.field(factory=dict)  # "host states", "pinned masters", "disk states", ...
    whole_parameters: int = 0  # weights that are whole between steps, and units if they were; no part of the total
    whole_units: int = 0  # stage 3: all units, if they were gathered at once
    largest_unit: int = 0  # the largest of them

    @property
    def model_states_bytes(self) -> int:
        """Bytes that stay between steps: weights, masters, gradients, optimizer states."""
        return self.parameters + self.masters + self.accumulators + self.states

    @property
    def total_bytes(self) -> int:
        """Maximum device memory of the partition on a rank."""
        return self.model_states_bytes + self.buckets + self.gathered_units + self.secondary_shards + self.extra_bytes

    @property
    def extra_bytes(self) -> int:
        """Device memory of what few policies have."""
        few = sum(self.outer.values()) + sum(self.compression.values())
        return self.gradient_errors + self.staging + self.columns + few

    @property
    def host_bytes(self) -> int:
        """CPU memory of offload, pinned or not."""
        return sum(size for owner, size in self.elsewhere.items() if not owner.startswith("disk "))

    @property
    def disk_bytes(self) -> int:
        """Disk space of offload."""
        return sum(size for owner, size in self.elsewhere.items() if owner.startswith("disk "))

    def ledger(self) -> dict[str, int]:
        """Bytes by owner, with the names of `Partition.ledger()`."""
        owners = ("parameters", "masters", "accumulators", "states", "buckets", "gathered_units", "secondary_shards")
        device = {owner.replace("_", " "): getattr(self, owner) for owner in owners}
        rare = {
            "gradient errors": self.gradient_errors,
            "staging": self.staging,
            "columns": self.columns,
            **self.compression,
            **self.outer,
        }
        return {**device, **{owner: size for owner, size in rare.items() if size}, **self.elsewhere}

    def __str__(self) -> str:
        width = max(16, *(len(owner) + 2 for owner in self.ledger()))
        rows = [f"{owner:{width}}{size / MIB:12,.1f} MiB" for owner, size in self.ledger().items()]
        where = " on the device" if self.elsewhere else ""
        rows += [
            f"{'total' + where:{width}}{self.total_bytes / MIB:12,.1f} MiB ({self.padding / MIB:,.1f} of it padding)"
        ]
        return "\n".join(rows)


def plan(
    module: nn.Module,
    *,
    policy: ZeroPolicy,
    world_size: int,
    optimizer: Callable[[list[Parameter]], torch.optim.Optimizer] | None = None,
    num_backwards: int = 1,
    device: str = "cpu",
) -> MemoryPlan:
    """Plan the memory of one of `world_size` ranks for `module`, if all of its trainable parameters are trained.

    module: may be on the meta device; nothing of its size is allocated.
    optimizer: creates an optimizer from a list of parameters; its states are measured by steps on small samples.
    num_backwards: backwards in a step (micro-steps times losses).  Where gradients are kept whole, a second one needs
        buffers.
    device: device type; with "cuda" host memory is pinned, unless the policy says otherwise.

    >>> import torch, zpartition
    >>> with torch.device("meta"):
    ...     model = torch.nn.Linear(1024, 1024)
    >>> def adamw(params):
    ...     return torch.optim.AdamW(params)
    >>> def bytes_at(stage):
    ...     policy = zpartition.ZeroPolicy(stage=stage)
    ...     return zpartition.plan(model, policy=policy, world_size=8, optimizer=adamw).model_states_bytes
    >>> bytes_at(3) < bytes_at(2) < bytes_at(0)
    True
    """
    made = _sample_optimizer(module, optimizer)
    trained, frozen = plan_layouts(module, named_groups(module, made), policy, world_size, block_numel(made))
    kept, states = _separate_accumulators(trained, policy), StateSizes(policy, optimizer)
    sizes = {bucket: states.of(bucket) for bucket in trained.buckets}
    buckets = (*trained.buckets, *frozen.buckets)
    tiers = _places(trained, policy)
    offloaded, on_device = ([b for b in tiers if (tiers[b] is Tier.DEVICE) == here] for here in (False, True))
    units = [b for b in buckets if b.unit is not None and policy.offload.weights is not Tier.DEVICE]  # offloaded ones
    spans_bytes = _gathered_bytes(module, units, policy) // min((b.num_shards for b in units), default=1)

    def is_apart(bucket: Bucket) -> bool:
        return policy.master_for(bucket.dtype) != bucket.dtype or bucket in units

    found = MemoryPlan(
        parameters=_resident_bytes(module, buckets, units),
        masters=sum(b.span_numel * policy.master_for(b.dtype).itemsize for b in on_device if is_apart(b)),
        accumulators=sum(
            b.span_numel * policy.accumulate_for(b.dtype).itemsize for b in kept if tiers[b] is Tier.DEVICE
        ),
        states=sum(sizes[b] for b in on_device),
        buckets=gradient_buffer_bytes(trained, policy, num_backwards, made) + _message_bytes(trained, policy),
        gathered_units=_gathered_bytes(module, buckets, policy),
        secondary_shards=_kept_bytes(trained, policy, True) + _kept_bytes(frozen, policy, False),
        padding=sum((_stored_numel(b) - _used_numel(b)) * b.dtype.itemsize for b in buckets),
        gradient_errors=_error_bytes(trained, policy),
        compression=compression_bytes(trained, made),
        staging=_staging_bytes(offloaded, spans_bytes, policy, num_backwards, device),
        columns=_column_bytes(offloaded, policy).get("columns", 0),
        elsewhere={
            **_offloaded_bytes(offloaded, policy, sizes, device),
            **_rollback_bytes(offloaded, policy, sizes, _copies_gradients(optimizer)),
            **_offloaded_weight_bytes(units, set(trained.buckets), policy, device),
            **_host_staging_bytes([*offloaded, *units], policy, device),
        },
    )
    return _with_whole_sizes(found, module, buckets)


def _sample_optimizer(
    module: nn.Module, make: Callable[[list[Parameter]], torch.optim.Optimizer] | None
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the trainable parameters; None if there is none."""
    params = [param for param in module.parameters() if param.requires_grad]
    return None if make is None or not params else make(params)


def count_bytes(partition: PartitionState, moved: Mapping[str, int]) -> dict[str, int]:
    """Count the bytes on this rank by owner, from live tensors; see `Partition.ledger`.

    On the device: weights between steps (frozen ones too), separate masters, reduced gradients, optimizer states, and
    buffers of gradients in flight and of gathered units.  Then owners elsewhere, `moved` included, if not empty.
    """
    own = set(map(id, partition.owned()))
    whole = sum(param.nbytes for param in partition.module.parameters() if id(param) not in own)
    found: collections.Counter[str] = collections.Counter()
    for storage in partition.storages:
        if not storage.shares_master and not _is_hollow(storage.master):
            found[_named("masters", storage.placement.tier, storage.master)] += storage.master.nbytes
    for storage in (*partition.storages, *partition.frozen):
        if isinstance(storage, ShardedStorage) and storage.param_placement.tier is not Tier.DEVICE:
            found[f"{_place(storage.param_placement)} parameters"] += storage.param_placement.num_bytes
    for gradient, storage in zip(partition.reducer.gradients, partition.storages):
        if gradient.store is not None:
            tier = Tier.DEVICE if storage.placement.tier is Tier.DEVICE else Tier.HOST
            found[_named("accumulators", tier, gradient.store)] += gradient.store.nbytes
    tiers = {id(storage.master): storage.placement.tier for storage in partition.storages}
    entries = partition.optimizer.state.items() if partition.optimizer is not None else ()
    for tensor, entry in entries:
        for key, value in entry.items():
            if is_large(key, value):
                found[_named("states", tiers.get(id(tensor), Tier.DEVICE), value)] += value.nbytes
    for reduction in partition.reducer.reductions.values():
        found["gradient errors"] += sum(errors.num_bytes for errors in reduction.errors.values())
    found.update(moved)
    found["host rollback"] = partition.speculative_step.num_bytes
    found.update(partition.updates.ledger())
    persistent = sum(storage.persistent_bytes for storage in (*partition.storages, *partition.frozen))
    device = {
        "parameters": whole + persistent,
        "masters": found.pop("masters", 0),
        "accumulators": found.pop("accumulators", 0),
        "states": found.pop("states", 0),
        "buckets": partition.reducer.pool.total_bytes,
        "gathered units": partition.unsharder.pool.total_bytes,
        "secondary shards": partition.unsharder.kept_bytes,
    }
    return {**device, **{owner: size for owner, size in sorted(found.items()) if size}}


def _places(layout: Layout, policy: ZeroPolicy) -> dict[Bucket, Tier]:
    return dict(zip(layout.buckets, policy.offload.place([bucket.span_numel for bucket in layout.buckets])))


def _offloaded_bytes(
    offloaded: list[Bucket], policy: ZeroPolicy, state_bytes: Mapping[Bucket, int], device: str
) -> dict[str, int]:
    """Bytes of offloaded masters, states and accumulators by place and owner, as `Partition.ledger()` names them."""
    if not offloaded:
        return {}
    host = "pinned" if device == "cuda" and policy.offload.pin else "host"
    masters = [b.span_numel * policy.master_for(b.dtype).itemsize for b in offloaded]
    states = [state_bytes[b] for b in offloaded]
    accumulators = sum(b.span_numel * policy.accumulate_for(b.dtype).itemsize for b in offloaded)
    found = {f"{host} accumulators": accumulators}
    if policy.offload.states is Tier.HOST:
        columns = {
            owner.replace("pinned", host): size
            for owner, size in _column_bytes(offloaded, policy).items()
            if owner != "columns"
        }
        return {f"{host} masters": sum(masters), **found, "host states": sum(states), **columns}
    on_disk = {"disk masters": 2 * sum(masters), "disk states": 2 * sum(states)}  # two slots each
    together = _max_buckets_in_memory([b.span_numel for b in offloaded], policy.offload)
    return {
        **found,
        **on_disk,
        "host step buffers": together * (_page_aligned(max(masters)) + _page_aligned(max(states))),
    }


def _rollback_bytes(
    offloaded: list[Bucket], policy: ZeroPolicy, state_bytes: Mapping[Bucket, int], copies: bool
) -> dict[str, int]:
    """Bytes of the values before a speculative update, and of the gradient that it reads."""
    if not offloaded or policy.offload.speculation is Speculation.OFF:
        return {}
    kept = sum(b.span_numel * policy.master_for(b.dtype).itemsize + state_bytes[b] for b in offloaded)
    scratch = max(b.span_numel * policy.accumulate_for(b.dtype).itemsize for b in offloaded)
    return {"host rollback": kept + (scratch if copies else 0)}


def _column_bytes(offloaded: list[Bucket], policy: ZeroPolicy) -> dict[str, int]:
    """Bytes of selective updates on the rank with most: columns on the device and on the host, pending gradients."""
    selective = policy.offload.selective
    if not selective.is_on:
        return {}
    columns = moments = pending = 0
    for bucket in offloaded:
        itemsize = policy.master_for(bucket.dtype).itemsize
        most = max(most_selected(bucket.pieces(rank), selective.topk_ratio) for rank in range(bucket.num_shards))
        columns += most * (itemsize + torch.int64.itemsize)
        moments += most * 2 * itemsize
        pending += bucket.span_numel * itemsize * (1 + selective.overlap)
    if selective.has_host_moments:
        return {"columns": columns, "host columns": moments, "pinned pending gradients": pending}
    return {"columns": columns + moments, "pinned pending gradients": pending}


def _copies_gradients(make: Callable[[list[Parameter]], torch.optim.Optimizer] | None) -> bool:
    """True if the optimizer may write into gradients (see speculate.py)."""
    return make is None or not getattr(make([Parameter(torch.zeros(1, 1))]), "keeps_gradients", False)


def _offloaded_weight_bytes(
    units: list[Bucket], trained: set[Bucket], policy: ZeroPolicy, device: str
) -> dict[str, int]:
    """Bytes of offloaded weights by place; frozen ones are never on disk."""
    found: dict[str, int] = {}
    kept = 0  # elements that stay on the host, as in `OffloadManager.place_params`
    for bucket in units:
        on_disk = policy.offload.weights is Tier.DISK and bucket in trained
        if on_disk and policy.offload.keeps_on_host(kept, bucket.span_numel):
            on_disk, kept = False, kept + bucket.span_numel
        host = "pinned" if device == "cuda" and policy.offload.pin else "host"
        place = "disk parameters" if on_disk else f"{host} parameters"
        size = bucket.span_numel * bucket.dtype.itemsize
        found[place] = found.get(place, 0) + (2 * size if on_disk else size)
    return found


def _staging_bytes(
    offloaded: list[Bucket], spans_bytes: int, policy: ZeroPolicy, num_backwards: int, device: str
) -> int:
    """Device memory of copies (mover.py): widened gradients waiting for the bus, and one being made; a sum with the
    host's values from the second backward on; and `spans_bytes`, of units that are being gathered.
    """
    if device != "cuda":
        return 0
    sizes = ((policy.accumulate_for(b.dtype).itemsize, policy.wire_for(b).itemsize) for b in offloaded)
    wide = max((b.span_numel * max(size) for b, size in zip(offloaded, sizes)), default=0)
    sums = wide if num_backwards > 1 else 0
    return (IN_FLIGHT + 1) * wide + sums + spans_bytes


def _host_staging_bytes(sent: list[Bucket], policy: ZeroPolicy, device: str) -> dict[str, int]:
    """Host memory that weights pass through on their way to a GPU."""
    if device != "cuda" or not sent:
        return {}
    place = "pinned" if policy.offload.pin else "host"
    return {f"{place} staging": NUM_STAGES * max(b.span_numel * b.dtype.itemsize for b in sent)}


def _max_buckets_in_memory(numels: list[int], offload: Offload) -> int:
    """Maximum number of buckets in memory during a step that reads and writes files."""
    groups = step_groups([Tier.DISK] * len(numels), numels, offload.step_numel)
    sizes = [len(group) for group in groups]
    return max(sum(sizes[first : first + offload.buffer_count]) for first in range(len(sizes)))


def _page_aligned(num_bytes: int) -> int:
    return -(-num_bytes // 4096) * 4096


def _stored_numel(bucket: Bucket) -> int:
    return bucket.numel if bucket.unit is None else bucket.span_numel


def _used_numel(bucket: Bucket) -> int:
    """Stored elements that belong to parameters, on average over the ranks."""
    used = sum(slot.numel for slot in bucket.slots)
    return used if bucket.unit is None else used // bucket.num_shards


def _separate_accumulators(layout: Layout, policy: ZeroPolicy) -> list[Bucket]:
    """Buckets with an accumulator of their own; others accumulate in the reduced buffer."""

    def travels_as_kept(bucket: Bucket) -> bool:
        wire = policy.wire_for(bucket)
        local = policy.accumulate_for(bucket.dtype)
        alone = layout.world_size == 1 and not policy.offload.moves_states
        return layout.num_shards == 1 and (alone or wire == local)

    return [bucket for bucket in layout.buckets if not travels_as_kept(bucket)]


def _gathered_bytes(module: nn.Module, buckets: Iterable[Bucket], policy: ZeroPolicy) -> int:
    """Bytes of units that are whole at once, maximum; see residence.py."""
    gathered = [bucket for bucket in buckets if bucket.unit is not None]
    return most_gathered_bytes(unit_numels(module, gathered), gathered, policy)


def _resident_bytes(module: nn.Module, buckets: tuple[Bucket, ...], offloaded: list[Bucket]) -> int:
    """Return the bytes of weights on the device between steps."""
    stored = sum(_stored_numel(b) * b.dtype.itemsize for b in buckets if b not in offloaded)
    return stored + _replicated_bytes(module, buckets)


def _with_whole_sizes(memory: MemoryPlan, module: nn.Module, buckets: tuple[Bucket, ...]) -> MemoryPlan:
    """Return the plan with the bytes of weights when they are whole."""
    sizes: collections.Counter[str | None] = collections.Counter()
    for bucket in buckets:
        sizes[bucket.unit] += bucket.numel * bucket.dtype.itemsize
    units = [size for unit, size in sizes.items() if unit is not None]
    return attrs.evolve(
        memory,
        whole_parameters=sum(sizes.values()) + _replicated_bytes(module, buckets),
        whole_units=sum(units),
        largest_unit=max(units, default=0),
    )


def _kept_bytes(layout: Layout, policy: ZeroPolicy, is_trained: bool) -> int:
    """Bytes of secondary copies of a layout's weights."""
    return sum(kept_bytes(bucket, policy.of(bucket), is_trained=is_trained) for bucket in layout.buckets)


def _message_bytes(layout: Layout, policy: ZeroPolicy) -> int:
    """Quantized gradients: send and receive buffers of each bucket in flight, and two float32 spans for sums."""
    if not policy.gradient_bits or layout.num_shards == 1:
        return 0
    code = zcomm.BlockCode(bits=policy.gradient_bits, block=GRADIENT_BLOCK)
    sizes = (2 * b.num_shards * code.num_bytes(b.span_numel) + 8 * b.span_numel for b in layout.buckets)
    return IN_FLIGHT_LIMIT * max(sizes, default=0)


def _error_bytes(layout: Layout, policy: ZeroPolicy) -> int:
    """Error feedback of quantized gradients: the errors of each message that a rank sends in a reduction."""
    if policy.gradient_error_beta == 1 or layout.num_shards == 1:
        return 0
    total, stored = 0, zcomm.ErrorFeedback.stored_bytes
    for bucket in layout.buckets:
        size = policy.of(bucket).gradient_hop_size
        first = size if 1 < size < bucket.num_shards else bucket.num_shards  # ranks of the first hop
        total += (first - 1) * stored(bucket.numel // first)
        total += (bucket.num_shards // first - 1) * stored(bucket.span_numel)
    return total


def _replicated_bytes(module: nn.Module, buckets: tuple[Bucket, ...]) -> int:
    """Bytes of frozen parameters that every rank keeps whole."""
    planned = {slot.name for bucket in buckets for slot in bucket.slots}
    return sum(p.numel() * p.element_size() for name, p in module.named_parameters() if name not in planned)


def _is_hollow(tensor: Tensor) -> bool:
    """Return whether `tensor` is one number, expanded: its values are on disk, or offloaded."""
    return tensor.numel() > 1 and not any(tensor.stride())


def _place(param_placement: ParamPlacement) -> str:
    if isinstance(param_placement, HostParams):
        return "pinned" if param_placement.host.is_pinned() else "host"
    return "disk"


def _named(owner: str, tier: Tier, tensor: Tensor) -> str:
    """Return the owner, prefixed with the place of one of its tensors if that is not the device."""
    if tier is Tier.DEVICE:
        return owner
    return f"{'pinned' if tensor.is_pinned() else 'host'} {owner}"
