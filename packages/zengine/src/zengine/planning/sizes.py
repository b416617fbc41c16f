"""Sizes of one rank: memory, traffic, and the peak with activations.

    peak = states, masters, accumulators, weights, buckets, gathered units    (zpartition.plan, exact or upper bound)
         + peak activations of one micro-batch                               (a dry run)

The optimizer's step has no activations and works in place, so the peak is in backward.  Activations for each
candidate micro-batch size come from a dry run, not from a guess.  Without a GPU the CPU's kernels stand in for the
GPU's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.nn import Parameter

import zoptim
import zpartition
from zengine.adapters.merging import DenseSizes, dense_sizes
from zengine.config import Plan
from zengine.config.plan.precision import default_master_dtype
from zengine.config.plan.zero import reduce_at
from zengine.planning.activations import Activations, dry_run
from zengine.planning.rounds import rounds_of, with_rounds

__all__ = [
    "Peak",
    "Sizes",
    "StageFit",
    "Workload",
    "at_stage",
    "best_fit",
    "fit_stages",
    "largest_micro_batch",
    "optimizer_factory",
    "peak",
    "rank_memory_bytes",
    "reduces_once",
    "sizes",
    "step_traffic_bytes",
    "switch_bytes",
]

_USUAL = "AdamW"  # optimizer of a config that leaves it to the caller
_MAX_MICRO_BATCH = 1 << 14  # samples
_GUESSES, _STEP_BACK = 3, 0.95  # of the search for the largest micro-batch


@attrs.frozen(kw_only=True)
class Sizes:
    """Memory and traffic of one rank, between and during steps, without activations."""

    memory: zpartition.MemoryPlan
    traffic: zpartition.TrafficPlan
    dense: DenseSizes = DenseSizes()  # noqa: RUF009 - frozen; of layers with adapters or quantized bases


def sizes(module: nn.Module, plan: Plan, *, world_size: int, device: str) -> Sizes:
    """Return the sizes of `module` (in the plan's dtype, on any device, also meta) under `plan`."""
    make, zero = optimizer_factory(module, plan), plan.zero
    if reduces_once(plan):
        zero = attrs.evolve(zero, reduce_at=zpartition.ReduceAt.BATCH)
    memory = zpartition.plan(
        module,
        policy=zero,
        world_size=world_size,
        optimizer=make,
        num_backwards=plan.batch.accumulation,
        device=device,
    )
    traffic = zpartition.plan_traffic(
        module,
        policy=zero,
        world_size=world_size,
        optimizer=make,
        num_backwards=plan.batch.accumulation,
    )
    rounds = rounds_of(module, plan, world_size=world_size, optimizer=make)
    if rounds is not None:
        memory, traffic = with_rounds(memory, traffic, rounds)
    return Sizes(memory=memory, traffic=traffic, dense=dense_sizes(module))


def reduces_once(plan: Plan) -> bool:
    """Return True for a pipeline, which reduces gradients once per batch whatever `reduce_at` is."""
    return plan.parallel.degrees.pipeline > 1


def at_stage(plan: Plan, stage: int) -> Plan:
    """Return the plan at another stage, without the settings that this stage ignores."""
    zero = plan.zero
    if stage == 0:
        zero = attrs.evolve(zero, shard_group_size=0, gradient_bits=0, gradient_hop_size=0)
    if stage < 3:
        offload = attrs.evolve(zero.offload, weights=zpartition.Tier.DEVICE)
        zero = attrs.evolve(zero, weight_bits=0, frozen_weight_bits=0, secondary_group_size=0, offload=offload)
    if plan.precision.param is None:
        zero = attrs.evolve(zero, master_dtype=default_master_dtype(stage))
    zero = attrs.evolve(zero, stage=stage, reduce_at=zpartition.ReduceAt.MICRO_STEP)  # allowed at every stage
    return _with_reduction(attrs.evolve(plan, zero=zero))


def _with_reduction(plan: Plan) -> Plan:
    """Return the plan with gradients reduced at the time that suits its stage and accumulation, or as configured."""
    section = plan.given.get("zero_optimization")
    given = (section.get("reduce_at") if isinstance(section, Mapping) else "") or ""
    moment = reduce_at(plan.zero.stage, plan.batch.accumulation, given if plan.zero.stage < 2 else "")
    return attrs.evolve(plan, zero=attrs.evolve(plan.zero, reduce_at=moment))


def optimizer_factory(module: nn.Module, plan: Plan) -> Callable[[list[Parameter]], torch.optim.Optimizer]:
    """Return a factory of the config's optimizer, or of AdamW.  It passes parameters by name if all have one."""
    names = {id(param): name for name, param in module.named_parameters()}
    kind = plan.optimizer.type or _USUAL
    options = dict(plan.optimizer.params) if plan.optimizer.type else {}

    def make(params: list[Parameter]) -> torch.optim.Optimizer:
        known = all(id(param) in names for param in params)
        given = [(names[id(param)], param) for param in params] if known else params
        return zoptim.make_optimizer(kind, given, options)

    return make


@final
@attrs.frozen(kw_only=True, eq=False)
class Workload:
    """Model and batches.  Each micro-batch size takes one dry run: activations are equal at every stage."""

    module: nn.Module  # in the plan's dtype, on any device, also meta
    batch: Callable[[int], Any]  # size of a micro-batch -> the model's argument
    device: str  # "cpu" | "cuda"
    autocast: torch.dtype = torch.float32  # dtype of torch.autocast around forward; float32: none
    _known: dict[int, Activations] = attrs.field(factory=dict, init=False)

    def activations(self, micro_batch: int) -> Activations:
        """Return the activations of a micro-batch size."""
        if micro_batch not in self._known:
            self._known[micro_batch] = self._run_dry(micro_batch)
        return self._known[micro_batch]

    def _run_dry(self, micro_batch: int) -> Activations:
        return dry_run(self.module, lambda: self.batch(micro_batch), device=self.dry_device, autocast=self.autocast)

    @property
    def dry_device(self) -> str:
        """Device whose kernels are counted."""
        return self.device if torch.cuda.is_available() else "cpu"


@attrs.frozen(kw_only=True)
class Peak:
    """Maximum memory of one rank's device in a step, by phase."""

    plan: Plan
    micro_batch: int
    sizes: Sizes
    activations: Activations
    is_approximate: bool = False  # the plan is for a GPU, and the CPU's kernels stand in

    @property
    def between_steps(self) -> int:
        """Bytes held between steps."""
        return self.sizes.memory.model_states_bytes + self.sizes.memory.secondary_shards

    @property
    def forward(self) -> int:
        """Upper bound of forward, in bytes."""
        return self.sizes.memory.total_bytes + self.activations.forward

    @property
    def backward(self) -> int:
        """Upper bound of backward, in bytes."""
        return self.sizes.memory.total_bytes + self.activations.backward

    @property
    def switch(self) -> int:
        """Bytes of the weights that a rollout gathers or copies; see `switch_bytes`."""
        return switch_bytes(self.sizes, self.plan)

    @property
    def generation(self) -> int:
        """Upper bound of the switch to generation, in bytes; 0 if nothing is gathered for it."""
        return _generation_bytes(self.sizes, self.plan)

    @property
    def total(self) -> int:
        """Maximum over all phases."""
        return max(self.forward, self.backward, self.generation)


@attrs.frozen(kw_only=True)
class StageFit:
    """Largest micro-batch that fits at one stage."""

    stage: int
    largest: int  # samples; 0: none fits
    peak: Peak | None  # with the largest fitting micro-batch that divides the batch; None if none fits


def switch_bytes(own: Sizes, plan: Plan) -> int:
    """Return the bytes of the weights that a rollout of the hybrid engine gathers or copies; 0 without one.

    One tensor rank gathers all units of stage 3, and has merged copies of the layers with adapters or quantized
    bases, unless the rollout is exact.  More ranks make a copy of a part each, with one unit, and one merged layer,
    at a time.  Caches come on top.
    """
    section, memory, dense = plan.hybrid_engine, own.memory, own.dense
    if not section.enabled:
        return 0
    if section.inference_tp_size == 1:
        return memory.whole_units + dense.total + dense.scratch
    computed = memory.whole_parameters - dense.sources + dense.total
    return -(-computed // section.inference_tp_size) + memory.largest_unit + dense.largest + dense.scratch


def _generation_bytes(own: Sizes, plan: Plan) -> int:
    """Return the bytes during a switch, for which the units of training are released; 0 without one."""
    switch = switch_bytes(own, plan)
    return own.memory.total_bytes - own.memory.gathered_units + switch if switch else 0


def peak(subject: Workload, plan: Plan, micro_batch: int, world_size: int) -> Peak:
    """Return the peak of a rank for a micro-batch size."""
    return Peak(
        plan=plan,
        micro_batch=micro_batch,
        sizes=sizes(subject.module, plan, world_size=world_size, device=subject.device),
        activations=subject.activations(micro_batch),
        is_approximate=subject.dry_device != subject.device,
    )


def largest_micro_batch(subject: Workload, plan: Plan, world_size: int, room_bytes: int) -> int:
    """Return the largest micro-batch whose peak fits, within 5%; 0 if one sample does not fit.

    Memory grows almost linearly with the samples: two sizes extrapolate to a guess, and a dry run must confirm it.
    """
    own = sizes(subject.module, plan, world_size=world_size, device=subject.device)
    if _generation_bytes(own, plan) > room_bytes:
        return 0
    room = room_bytes - own.memory.total_bytes
    best, known = (1, 2) if subject.activations(1).peak <= room else (0, 0)
    for _ in range(_GUESSES if best else 0):
        low, high = sorted((best, known))
        growth = (subject.activations(high).peak - subject.activations(low).peak) / (high - low)
        guess = min(_MAX_MICRO_BATCH, best + int((room - subject.activations(best).peak) / max(growth, 1)))
        while guess > best and subject.activations(guess).peak > room:
            guess = max(best, min(guess - 1, int(guess * _STEP_BACK)))
        if guess == best:
            break
        best, known = guess, best
    return best


def fit_stages(subject: Workload, plan: Plan, world_size: int, room_bytes: int) -> Iterator[StageFit]:
    """Yield the largest micro-batch of each stage, and the peak with one that keeps the plan's batch size."""
    share = plan.batch.train_batch_size // plan.batch.replicas
    for stage in range(4 if world_size > 1 else 1):
        found = StageFit(stage=stage, largest=0, peak=None)
        for accumulation in (1, 2):  # buffers depend on one micro-step or several, not on the number
            other = _with_batch(at_stage(plan, stage), share, accumulation)
            largest = largest_micro_batch(subject, other, world_size, room_bytes)
            micro = _divisor_below(share, largest if accumulation > 1 or largest >= share else 0)
            found = attrs.evolve(found, largest=max(found.largest, largest))
            if micro:
                fitted = _with_batch(other, micro, share // micro)
                yield attrs.evolve(found, peak=peak(subject, fitted, micro, world_size))
                break
        else:
            yield found


def _with_batch(plan: Plan, micro_batch: int, accumulation: int) -> Plan:
    total = micro_batch * accumulation * plan.batch.replicas
    batch = attrs.evolve(plan.batch, train_batch_size=total, micro_batch_size=micro_batch, accumulation=accumulation)
    return _with_reduction(attrs.evolve(plan, batch=batch))


def step_traffic_bytes(subject: Workload, plan: Plan, stage: int, accumulation: int, world_size: int) -> int:
    """Return the bytes that one rank sends in a step of `accumulation` micro-batches at a stage."""
    other = _with_batch(at_stage(plan, stage), 1, accumulation)
    return sizes(subject.module, other, world_size=world_size, device=subject.device).traffic.total_bytes


def rank_memory_bytes(device_type: str, num_ranks: int) -> int:
    """Return the memory of one rank: that of its GPU, or its share of this host's, on which `num_ranks` run."""
    if device_type == "cuda":
        total: int = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        return total
    words = Path("/proc/meminfo").read_text(encoding="ascii").split()
    return int(words[words.index("MemTotal:") + 1]) * 1024 // num_ranks


def best_fit(found: Iterable[StageFit]) -> tuple[int, Peak] | None:
    """Return the stage with the least traffic for the same batch, the lowest of equals; None if no stage fits."""
    fitting = [(each.stage, each.peak) for each in found if each.peak is not None]
    return min(fitting, key=lambda pair: (pair[1].sizes.traffic.total_bytes, pair[0]), default=None)


def _divisor_below(number: int, most: int) -> int:
    """Return the largest divisor of `number` that is at most `most`; 0 if there is none."""
    return next((size for size in range(min(number, most), 0, -1) if number % size == 0), 0)
