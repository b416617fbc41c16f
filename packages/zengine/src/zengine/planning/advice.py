"""Advice about a config: consequences with numbers, not opinions.

Each rule is a function from a `Case` to advice; `RULES` is the list.  A rule applies only where its subject is
active, and gives the keys of the alternative.  The numbers of the alternative come from the config with these keys
changed, read and resolved like any config: so rejected settings are never advised, and every number is attainable.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

import zoptim
from zengine.config import Config, ConfigError, Facts, Plan, load, resolve
from zengine.planning.sizes import Sizes, at_stage, sends_once, sizes
from zengine.planning.tables import gib, ranks
from zprecision import DynamicScaling

__all__ = ["Advice", "Case", "advised", "edited", "worth_knowing"]

_LOOKED_AT = 4  # first updates of a schedule
_LONGEST_LOOK = 5000  # updates, for the one that is half way up
_HIGH_SCALE = 2**13
_USUAL_HOST = 8  # ranks


@attrs.frozen(kw_only=True)
class Advice:
    """One or two sentences, and the keys of the alternative."""

    text: str
    changes: Mapping[str, Any] = attrs.field(factory=dict)  # keys of the config -> values; None leaves a key out


@attrs.frozen(kw_only=True)
class Case:
    """Plan with its sources, and its memory and traffic for a model."""

    config: Config
    plan: Plan
    facts: Facts
    module: nn.Module  # on the meta device, in the plan's dtype
    sizes: Sizes

    @property
    def num_ranks(self) -> int:
        """Ranks that share the states of the same parameters."""
        return self.plan.parallel.gradient_ranks

    @property
    def sent_bytes(self) -> int:
        """Bytes sent by a rank in a step."""
        return self.sizes.traffic.total_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes held by a rank on its device, without activations."""
        return self.sizes.memory.total_bytes

    def of(self, plan: Plan) -> Sizes:
        """Return the sizes of another plan for the same model."""
        return sizes(self.module, plan, world_size=plan.parallel.gradient_ranks, device=self.facts.device_type)

    def changed(self, changes: Mapping[str, Any]) -> Iterator[Case]:
        """Yield the case with other config values; nothing if the config rejects them."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                filled = {key: value for key, value in self.config.filled.items() if key not in changes}
                config = load(edited(self.config.document, changes), auto=filled)
                plan = resolve(config, self.facts)
        except ConfigError:
            return
        yield attrs.evolve(self, config=config, plan=plan, sizes=self.of(plan))


def edited(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with dotted keys set, or removed where the value is None."""
    found: dict[str, Any] = copy.deepcopy(dict(document))
    for key, value in changes.items():
        *path, last = key.split(".")
        section = found
        for name in path:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return found


Rule = Callable[[Case], Iterator[Advice]]


def the_parts_of_a_copy(case: Case) -> Iterator[Advice]:
    """Model parallelism: sizes are of whole layers, since the split is known only when the model runs."""
    parallel = case.plan.parallel
    if parallel.model_parallel_size > 1:
        yield Advice(
            text=f"{parallel.model_parallel_size} ranks hold one copy of the model (pipeline "
            f"{parallel.degrees.pipeline} x tensor {parallel.degrees.tensor}), and {parallel.gradient_ranks} hold "
            "the same parts. The sizes here are of whole layers: those that are split take "
            f"1/{parallel.model_parallel_size} of it on each rank, and send activations too"
        )
    if parallel.degrees.expert > 1:
        yield Advice(
            text=f"{parallel.degrees.expert} ranks share the experts of each layer out. The sizes here are of all of "
            f"them: weights, gradients and states of experts take 1/{parallel.degrees.expert} of it on each rank, "
            "and tokens travel twice each way"
        )


def the_first_updates(case: Case) -> Iterator[Advice]:
    """DeepSpeed's warm-ups begin with two updates at the lowest rate."""
    plan = case.plan
    idle = _idle(plan)
    if not idle:
        return
    number = f"at least {idle}" if idle == _LOOKED_AT else str(idle)
    told = (
        f"The first {number} updates run at a learning rate of 0: "
        f"{idle * plan.batch.train_batch_size:,} samples change nothing."
    )
    if plan.scheduler.type.startswith("Warmup"):
        told += " That is the law of DeepSpeed's warm-ups"
        for name, value in (("warmup_min_lr", 1e-6), ("warmup_min_ratio", 0.01)):
            changes = {f"scheduler.params.{name}": value}
            if any(not _idle(other.plan) for other in case.changed(changes)):
                yield Advice(text=f'{told}; "{name}" above 0 makes them count.', changes=changes)
                return
        told += "."
    yield Advice(text=told)


def the_warm_up(case: Case) -> Iterator[Advice]:
    """Warm-up: the default is logarithmic, and the cosine's is one update ahead."""
    kind, params = case.plan.scheduler.type, case.plan.scheduler.params
    if not kind.startswith("Warmup"):
        return
    steps = params.get("warmup_num_steps", 1000)
    half = _half_way(case.plan) if "warmup_type" not in params and steps > 4 else 0
    if half:
        yield Advice(
            text="The warm-up is logarithmic by default: half of the way to the peak rate is done at update "
            f'{half} of {steps}. "warmup_type": "linear" is what most papers mean.',
            changes={"scheduler.params.warmup_type": "linear"},
        )
    if kind == "WarmupCosineLR" and not params.get("exact_peak"):
        yield Advice(
            text="WarmupCosineLR never reaches the peak rate: its cosine is one update ahead when the warm-up ends. "
            '"exact_peak": true (ours) makes it.',
            changes={"scheduler.params.exact_peak": True},
        )


def the_loss_scale(case: Case) -> Iterator[Advice]:
    """Initial loss scale: fp16 starts too high on purpose."""
    scaling = case.plan.scaling
    if not isinstance(scaling, DynamicScaling):
        return
    high = ", often too high on purpose" if scaling.initial >= _HIGH_SCALE else ""
    yield Advice(
        text=f"The loss scale starts at {scaling.initial:,.0f}{high}: each overflow leaves an update out, and the "
        f"scale is lowered only at overflow {scaling.hysteresis} (hysteresis). It grows after {scaling.window} clean "
        'updates. "bf16" needs no scale, where the device has it.'
    )


def the_name_adam(case: Case) -> Iterator[Advice]:
    """Optimizer "adam": DeepSpeed's decouples weight decay."""
    optimizer = case.plan.optimizer
    if (
        optimizer.type.lower() == "adam"
        and optimizer.params.get("weight_decay")
        and "adam_w_mode" not in optimizer.params
    ):
        yield Advice(
            text='optimizer.type "Adam" is AdamW, here as in DeepSpeed: its weight decay is decoupled. '
            '"adam_w_mode": false gives the older L2 penalty.',
            changes={"optimizer.params.adam_w_mode": False},
        )


def traffic_of_accumulation(case: Case) -> Iterator[Advice]:
    """Traffic of accumulation: stages 0 and 1 can exchange once a step; stage 3 gathers each time."""
    plan, count = case.plan, case.plan.batch.accumulation
    gradients = sum(f.num_bytes for f in case.sizes.traffic.flows if f.what.startswith(("gradients", "sums")))
    if count == 1 or not gradients or plan.zero.reduce_at.value == "boundary" or sends_once(plan):
        return
    told = (
        f"With {count} micro-steps gradients travel {count} times: {gib(gradients)} of the {gib(case.sent_bytes)} "
        "that a rank sends in a step."
    )
    if plan.zero.stage == 3:
        yield from _less_accumulation(case, f"{told} Weights are gathered in each micro-step, too.")
        return
    stage = min(plan.zero.stage, 1)
    changes = {"zero_optimization.stage": stage, "zero_optimization.reduce_at": "boundary"}
    for other in case.changed(changes):
        if other.sent_bytes < case.sent_bytes:
            where = f'{f"stage {stage} with " if stage != plan.zero.stage else ""}"reduce_at": "boundary"'
            told += f" In zero_optimization, {where} sends {gib(other.sent_bytes)} and holds {gib(other.held_bytes)} "
            yield Advice(text=f"{told}instead of {gib(case.held_bytes)}.", changes=changes)


def _less_accumulation(case: Case, told: str) -> Iterator[Advice]:
    """Compare with the same batch in one micro-step."""
    micro = case.plan.batch.micro_batch_size * case.plan.batch.accumulation
    changes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
    for other in case.changed(changes):
        if other.sent_bytes < case.sent_bytes:
            yield Advice(
                text=f"{told} A larger micro-batch sends less, {gib(other.sent_bytes)} without accumulation "
                f"(train_micro_batch_size_per_gpu {micro}); zengine plan tells which one fits.",
                changes=changes,
            )


def the_bucket_size(case: Case) -> Iterator[Advice]:
    """Bucket size: 5e8 was chosen for large GPUs of 2020."""
    numel, given = case.plan.zero.bucket_numel, case.sizes.memory
    changes = {"zero_optimization.reduce_bucket_size": None}
    for other in case.changed(changes) if numel else ():
        derived = other.sizes.memory
        if given.total_bytes - derived.total_bytes > given.total_bytes / 50 and derived.buckets < given.buckets:
            yield Advice(
                text=f"reduce_bucket_size {numel:,} costs {gib(given.buckets)} of buffers for this model; left "
                f"out, it is derived from the model's size and costs {gib(derived.buckets)}.",
                changes=changes,
            )


def the_stage(case: Case) -> Iterator[Advice]:
    """Stage: suggest a lower one where it suffices."""
    stage = case.plan.zero.stage
    if case.num_ranks == 1:
        lowest = 1 if case.plan.zero.offload.moves_states else 0
        if stage and len({case.of(at_stage(case.plan, each)).memory.total_bytes for each in range(lowest, 4)}) == 1:
            yield Advice(text=f"On one rank stage {stage} shards nothing: all stages need the same memory.")
        return
    if stage < 3 or case.plan.zero.offload.moves_states:
        return
    changes = {"zero_optimization.stage": 2}
    for lower in case.changed(changes):
        if lower.sent_bytes > case.sent_bytes:
            continue
        ratio = case.sent_bytes / lower.sent_bytes
        told = (
            f"Stage 3 sends {ratio:.2f} times what stage 2 does ({gib(case.sent_bytes)} and {gib(lower.sent_bytes)}) "
        )
        told += f"and holds {gib(case.held_bytes)} in place of {gib(lower.held_bytes)} beside the activations: "
        is_smaller = case.held_bytes < lower.held_bytes
        verdict = "worth it only if those need the room." if is_smaller else "stage 2 is better here in both."
        yield Advice(text=told + verdict, changes=changes)


def what_stays_whole(case: Case) -> Iterator[Advice]:
    """Live parameters: DeepSpeed's default of a billion does not limit most models."""
    zero, whole = case.plan.zero, case.sizes.memory.gathered_units
    if zero.stage < 3 or not zero.max_live_numel or not whole:
        return
    changes = {"zero_optimization.stage3_max_live_parameters": 0}
    for strict in case.changed(changes):
        if strict.sizes.memory.gathered_units < 0.7 * whole:
            yield Advice(
                text=f"stage3_max_live_parameters {zero.max_live_numel:,} lets {gib(whole)} of gathered weights be "
                "whole at once, which backward finds. With 0 it gathers them again: a rank holds "
                f"{gib(strict.held_bytes)} instead of {gib(case.held_bytes)} and sends {gib(strict.sent_bytes)} "
                f"instead of {gib(case.sent_bytes)}.",
                changes=changes,
            )


def host_memory(case: Case) -> Iterator[Advice]:
    """Offload: memory moves to the host."""
    memory = case.sizes.memory
    count = case.facts.ranks_per_host or min(_USUAL_HOST, case.facts.world_size)
    if memory.host_bytes:
        pinned = sum(size for owner, size in memory.elsewhere.items() if owner.startswith("pinned "))
        locked = f", {gib(pinned * count)} of it page-locked, so that the system cannot swap it" if pinned else ""
        yield Advice(
            text=f"Offload asks {gib(memory.host_bytes)} of host memory of each rank: "
            f"{gib(memory.host_bytes * count)} on a host with {ranks(count)}{locked}."
        )
    if memory.disk_bytes:
        yield Advice(
            text=f"Offload keeps {gib(memory.disk_bytes)} of files for each rank: two versions, so that one counts."
        )


def small_parameters(case: Case) -> Iterator[Advice]:
    """Small parameters: stage 3 does not shard them."""
    zero = case.plan.zero
    if zero.stage < 3 or case.num_ranks == 1:
        return
    params = list(case.module.parameters())
    kept: list[int] = []
    for numel in (param.numel() for param in params):
        if numel < zero.persist_numel and sum(kept) + numel <= zero.persist_total_numel:
            kept.append(numel)
    if kept:
        share = sum(kept) / sum(param.numel() for param in params)
        yield Advice(
            text=f"{len(kept)} of {len(params)} parameters are below stage3_param_persistence_threshold "
            f"({zero.persist_numel:,}) and stay whole on every rank: {_percent(share)} of the elements."
        )


RULES: tuple[Rule, ...] = (
    the_parts_of_a_copy,
    the_first_updates,
    the_warm_up,
    the_loss_scale,
    the_name_adam,
    traffic_of_accumulation,
    the_bucket_size,
    the_stage,
    what_stays_whole,
    host_memory,
    small_parameters,
)


def advised(case: Case) -> tuple[Advice, ...]:
    """Return the advice of all rules."""
    return tuple(advice for rule in RULES for advice in rule(case))


def worth_knowing(case: Case) -> tuple[str, ...]:
    """Return every sentence, and the notices of the plan."""
    return (*(" ".join(advice.text.split()) for advice in advised(case)), *case.plan.notices)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _idle(plan: Plan) -> int:
    """Return the number of first updates with a rate of 0."""
    return len(list(itertools.takewhile(lambda rate: rate == 0, itertools.islice(_rates(plan), _LOOKED_AT))))


def _half_way(plan: Plan) -> int:
    """Return the update, from 1, at which a warm-up is half done; 0: never, or very late."""
    schedule = _schedule(plan)
    first, peak = (schedule.lrs(t)[0] for t in (0, schedule.warmup_num_steps))
    rates = enumerate(itertools.islice(_rates(plan), _LONGEST_LOOK), 1)
    return next((number for number, rate in rates if abs(rate - first) >= abs(peak - first) / 2 > 0), 0)


def _rates(plan: Plan) -> Iterator[float]:
    """Yield the learning rates of the updates; none without a schedule, or if it depends on the loss."""
    if plan.scheduler.type in ("", "ReduceLROnPlateau"):
        return
    schedule = _schedule(plan)
    while True:
        yield float(schedule.optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's: nothing is updated here
            schedule.step()


def _schedule(plan: Plan) -> Any:
    """Return the schedule of a plan, over one parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, options = (plan.optimizer.type, dict(plan.optimizer.params)) if plan.optimizer.type else ("AdamW", {})
        optimizer = zoptim.make_optimizer(kind, [torch.nn.Parameter(torch.zeros(1, 1))], options)
        return zoptim.make_schedule(plan.scheduler.type, optimizer, plan.scheduler.params)
