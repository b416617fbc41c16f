"""What a reader of a config may not know, with its numbers: consequences, not opinions.

Each rule is a function from a `Case` to sentences; `RULES` is the list.  A rule speaks only where its subject acts,
and says what to write for the other choice.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator

import attrs
import torch
from torch import nn

import zoptim
import zpartition
from zengine.config import Config, Facts, Plan
from zengine.planning.sizes import Sizes, at_stage, sends_once, sizes
from zengine.planning.tables import gib
from zprecision import DynamicScaling

__all__ = ["Case", "worth_knowing"]

_BOUNDARY = zpartition.ReduceAt.BOUNDARY
_LOOKED_AT = 4  # first updates of a schedule


@attrs.frozen(kw_only=True)
class Case:
    """A plan with what it was made from, and what it needs for a model."""

    config: Config
    plan: Plan
    facts: Facts
    module: nn.Module  # on the meta device, in the plan's dtype
    sizes: Sizes

    def other(self, plan: Plan) -> Sizes:
        """What another plan would need for the same model."""
        return sizes(self.module, plan, world_size=plan.parallel.gradient_ranks, device=self.facts.device_type)


Rule = Callable[[Case], Iterator[str]]


def the_parts_of_a_copy(case: Case) -> Iterator[str]:
    """What a rank holds is counted for whole layers: which of them are split is known once the model runs."""
    parallel = case.plan.parallel
    if parallel.cells > 1:
        yield (
            f"{parallel.cells} ranks hold one copy of the model (pipeline {parallel.degrees.pipeline} x tensor "
            f"{parallel.degrees.tensor}), and {parallel.gradient_ranks} hold the same parts. The sizes here are of "
            f"whole layers: those that are split take 1/{parallel.cells} of it on each rank, and send activations too"
        )
    if parallel.degrees.expert > 1:
        yield (
            f"{parallel.degrees.expert} ranks share the experts of each layer out. The sizes here are of all of "
            f"them: weights, gradients and states of experts take 1/{parallel.degrees.expert} of it on each rank, "
            "and tokens travel twice each way"
        )


def the_first_updates(case: Case) -> Iterator[str]:
    """Warm-ups of DeepSpeed begin with two updates at the lowest rate; the default law is logarithmic."""
    rates = _first_rates(case.plan)
    idle = next((index for index, rate in enumerate(rates) if rate), len(rates))
    if idle:
        samples = idle * case.plan.batch.train_batch_size
        yield (
            f"The first {idle} updates run at a learning rate of 0: {samples:,} samples change nothing. That is the "
            'law of DeepSpeed\'s warm-ups; "warmup_min_lr" above 0 makes them count.'
        )
    params = case.plan.scheduler.params
    if case.plan.scheduler.type.startswith("Warmup") and params.get("warmup_type", "log") == "log":
        steps = params.get("warmup_num_steps", 1000)
        if steps > 4:
            yield (
                f"The warm-up is logarithmic by default: half of the peak rate is reached at update "
                f'{math.isqrt(steps)} of {steps}. "warmup_type": "linear" is what most papers mean.'
            )
    if case.plan.scheduler.type == "WarmupCosineLR":
        yield "WarmupCosineLR never reaches the peak rate: its cosine is one update ahead when the warm-up ends."


def the_loss_scale(case: Case) -> Iterator[str]:
    """fp16 starts too high on purpose."""
    scaling = case.plan.scaling
    if not isinstance(scaling, DynamicScaling):
        return
    yield (
        f"The loss scale starts at {scaling.initial:,.0f}, often too high on purpose: each overflow leaves an update "
        f"out, and the scale halves only at overflow {scaling.hysteresis} (hysteresis). It doubles after "
        f'{scaling.window} clean updates. "bf16" needs no scale, where the device has it.'
    )


def the_name_adam(case: Case) -> Iterator[str]:
    """DeepSpeed's Adam decouples the decay."""
    optimizer = case.plan.optimizer
    if (
        optimizer.type.lower() == "adam"
        and optimizer.params.get("weight_decay")
        and "adam_w_mode" not in optimizer.params
    ):
        yield (
            'optimizer.type "Adam" is AdamW, here as in DeepSpeed: its weight decay is decoupled. '
            '"adam_w_mode": false gives the older L2 penalty.'
        )


def traffic_of_accumulation(case: Case) -> Iterator[str]:
    """Stages 0 and 1 can exchange once a step; stage 3 gathers in every micro-step."""
    plan, here = case.plan, case.sizes
    count = plan.batch.accumulation
    if count == 1 or not here.traffic.total_bytes or plan.zero.reduce_at.value == "boundary" or sends_once(plan):
        return
    told = f"With {count} micro-steps gradients travel {count} times: {gib(here.traffic.total_bytes)} a step."
    if plan.zero.stage == 3:
        yield f"{told} So do weights; a larger micro-batch with less accumulation sends less (zengine plan finds it)."
        return
    other = at_stage(plan, min(plan.zero.stage, 1))
    once = case.other(attrs.evolve(other, zero=attrs.evolve(other.zero, reduce_at=_BOUNDARY)))
    where = 'stage 1 with "reduce_at": "boundary"' if plan.zero.stage == 2 else '"reduce_at": "boundary"'
    yield (
        f"{told} In zero_optimization, {where} sends {gib(once.traffic.total_bytes)} and holds "
        f"{gib(once.memory.total_bytes)} instead of {gib(here.memory.total_bytes)}."
    )


def the_bucket_size(case: Case) -> Iterator[str]:
    """5e8 is a number of large GPUs of 2020."""
    zero = case.plan.zero
    if not zero.bucket_numel:
        return
    derived = case.other(attrs.evolve(case.plan, zero=attrs.evolve(zero, bucket_numel=0)))
    given = case.sizes.memory
    saved = given.total_bytes - derived.memory.total_bytes
    if saved > given.total_bytes / 50:
        yield (
            f"reduce_bucket_size {zero.bucket_numel:,} costs {gib(given.buckets)} of buffers for this model; left "
            f"out, it is derived from the model's size and costs {gib(derived.memory.buckets)}."
        )


def other_stages(case: Case) -> Iterator[str]:
    """Where the next stage up would pay, or the next one down would do."""
    stage, world = case.plan.zero.stage, case.facts.world_size
    if world == 1:
        if stage:
            yield f"On one rank stage {stage} shards nothing: all stages need the same memory."
        return
    if case.plan.zero.offload.moves_states or stage == 0:
        return
    if stage == 3:
        lower, here = case.other(at_stage(case.plan, stage - 1)), case.sizes
        ratio = here.traffic.total_bytes / max(1, lower.traffic.total_bytes)
        yield (
            f"Stage 3 sends {ratio:.2f} times what stage 2 does and holds {gib(here.memory.total_bytes)} in place "
            f"of {gib(lower.memory.total_bytes)} beside the activations: worth it only if those need the room."
        )


def what_stays_whole(case: Case) -> Iterator[str]:
    """DeepSpeed's default of a billion live parameters is no limit for most models."""
    plan, here = case.plan, case.sizes
    if plan.zero.stage < 3 or case.facts.world_size == 1 or not plan.zero.max_live_numel:
        return
    strict = case.other(attrs.evolve(plan, zero=attrs.evolve(plan.zero, max_live_numel=0)))
    if strict.memory.gathered_units < 0.7 * here.memory.gathered_units:
        yield (
            f"stage3_max_live_parameters {plan.zero.max_live_numel:,} lets {gib(here.memory.gathered_units)} of "
            "whole weights stay from forward to backward. 0 gathers them twice: it holds "
            f"{gib(strict.memory.total_bytes)} instead of {gib(here.memory.total_bytes)} and sends "
            f"{gib(strict.traffic.total_bytes)} instead of {gib(here.traffic.total_bytes)}."
        )


def host_memory(case: Case) -> Iterator[str]:
    """Offload moves the need; it does not remove it."""
    memory, ranks = case.sizes.memory, case.facts.ranks_per_host or min(8, case.facts.world_size)
    if memory.host_bytes:
        pinned = " and page-locked, so that the system cannot swap it" if case.plan.zero.offload.pin else ""
        yield (
            f"Offload asks {gib(memory.host_bytes)} of host memory of each rank: {gib(memory.host_bytes * ranks)} "
            f"on a host with {ranks} ranks{pinned}."
        )
    if memory.disk_bytes:
        yield f"Offload keeps {gib(memory.disk_bytes)} of files for each rank: two versions, so that one counts."


def small_parameters(case: Case) -> Iterator[str]:
    """What stage 3 keeps whole."""
    if case.plan.zero.stage < 3 or case.facts.world_size == 1:
        return
    limit = case.plan.zero.persist_numel
    params = list(case.module.parameters())
    kept = [param for param in params if param.numel() < limit]
    if kept:
        share = sum(param.numel() for param in kept) / max(1, sum(param.numel() for param in params))
        yield (
            f"{len(kept)} of {len(params)} parameters are below stage3_param_persistence_threshold ({limit:,}) and "
            f"stay whole on every rank: {share:.1%} of the elements."
        )


RULES: tuple[Rule, ...] = (
    the_parts_of_a_copy,
    the_first_updates,
    the_loss_scale,
    the_name_adam,
    traffic_of_accumulation,
    the_bucket_size,
    other_stages,
    what_stays_whole,
    host_memory,
    small_parameters,
)


def worth_knowing(case: Case) -> tuple[str, ...]:
    """Every sentence, and the notices of the plan."""
    found = [" ".join(sentence.split()) for rule in RULES for sentence in rule(case)]
    return (*found, *case.plan.notices)


def _first_rates(plan: Plan) -> list[float]:
    """Learning rates of the first updates; none without a schedule that can be made here."""
    if not plan.scheduler.type:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, options = (plan.optimizer.type, dict(plan.optimizer.params)) if plan.optimizer.type else ("AdamW", {})
        optimizer = zoptim.make_optimizer(kind, [torch.nn.Parameter(torch.zeros(1, 1))], options)
        schedule = zoptim.make_schedule(plan.scheduler.type, optimizer, plan.scheduler.params)
        rates = []
        for _ in range(_LOOKED_AT):
            rates.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step()
    return rates
