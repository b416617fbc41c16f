"""Advice about a config: consequences with numbers, not opinions.

Each rule is a function from a `Case` to advice; `RULES` is the list.  A rule applies only if the config uses its
subject, and gives the keys of the alternative.  The numbers of the alternative come from the config with these keys
changed, read and resolved like any config: so rejected settings are never advised, and every number is attainable.
"""

from __future__ import annotations

import copy
import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import attrs
import torch
from torch import nn

import zoptim
from zengine.config import Config, ConfigError, Facts, Plan, load, resolve
from zengine.planning.rounds import rounds_of
from zengine.planning.sizes import Sizes, at_stage, optimizer_factory, reduces_once, sizes
from zengine.planning.tables import gib, ranks
from zprecision import DynamicScaling

__all__ = ["Advice", "Case", "advice_lines", "collect_advice", "with_changes"]

_FIRST_UPDATES = 4  # inspected for a learning rate of 0
_MAX_WARMUP = 5000  # updates searched for the middle of a warm-up
_HIGH_SCALE = 2**13
_RANKS_PER_HOST = 8  # if unknown


@attrs.frozen(kw_only=True)
class Advice:
    """One or two sentences, and the keys of the alternative."""

    text: str
    changes: Mapping[str, Any] = attrs.field(factory=dict)  # config keys -> values; None removes a key


@attrs.frozen(kw_only=True, slots=False)  # for the cached property
class Case:
    """Config, plan, facts and model, with the plan's memory and traffic."""

    config: Config
    plan: Plan
    facts: Facts
    module: nn.Module  # on the meta device, in the plan's dtype

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Memory and traffic of the plan, computed on first use: some rules need only the plan."""
        return self.of(self.plan)

    @property
    def num_ranks(self) -> int:
        """Ranks that share the states of the same parameters."""
        return self.plan.parallel.gradient_ranks

    @property
    def sent_bytes(self) -> int:
        """Bytes that a rank sends in a step."""
        return self.sizes.traffic.total_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that a rank holds on its device, without activations."""
        return self.sizes.memory.total_bytes

    def of(self, plan: Plan) -> Sizes:
        """Return the sizes of another plan for the same model."""
        return sizes(self.module, plan, world_size=plan.parallel.gradient_ranks, device=self.facts.device_type)

    def changed(self, changes: Mapping[str, Any]) -> Iterator[Case]:
        """Yield the case with `changes`; nothing if the config rejects them."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                filled = {key: value for key, value in self.config.filled.items() if key not in changes}
                config = load(with_changes(self.config.document, changes), auto=filled)
                plan = resolve(config, self.facts)
        except ConfigError:
            return
        yield attrs.evolve(self, config=config, plan=plan)


def with_changes(document: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `document` with dotted keys set, or removed if the value is None."""
    changed: dict[str, Any] = copy.deepcopy(dict(document))
    for key, value in changes.items():
        *path, last = key.split(".")
        section = changed
        for name in path:
            if not isinstance(section.get(name), dict):
                section[name] = {}
            section = section[name]
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return changed


Rule = Callable[[Case], Iterator[Advice]]


def advise_model_parallelism(case: Case) -> Iterator[Advice]:
    """Model parallelism: sizes are of whole layers, since the split needs the real model."""
    parallel = case.plan.parallel
    if parallel.model_parallel_size > 1:
        yield Advice(
            text=f"{parallel.model_parallel_size} ranks hold one copy of the model (pipeline "
            f"{parallel.degrees.pipeline} x tensor {parallel.degrees.tensor}), and {parallel.gradient_ranks} hold "
            f"the same parts. The sizes here are of whole layers: a split layer needs "
            f"1/{parallel.model_parallel_size} of them on each rank, and sends activations too"
        )
    if parallel.degrees.expert > 1:
        yield Advice(
            text=f"{parallel.degrees.expert} ranks shard the experts of each layer. The sizes here are of all "
            f"experts: each rank holds 1/{parallel.degrees.expert} of their weights, gradients and states, and each "
            "layer adds two all-to-alls of tokens in forward and two in backward"
        )


def advise_idle_updates(case: Case) -> Iterator[Advice]:
    """Learning rate 0: DeepSpeed's warm-ups begin with two updates at the lowest rate."""
    plan = case.plan
    idle = _idle(plan)
    if not idle:
        return
    number = f"at least {idle}" if idle == _FIRST_UPDATES else str(idle)
    text = (
        f"The first {number} updates run at a learning rate of 0: "
        f"{idle * plan.batch.train_batch_size:,} samples change nothing."
    )
    if plan.scheduler.type.startswith("Warmup"):
        text += " DeepSpeed's warm-ups are defined so"
        for name, value in (("warmup_min_lr", 1e-6), ("warmup_min_ratio", 0.01)):
            changes = {f"scheduler.params.{name}": value}
            if any(not _idle(other.plan) for other in case.changed(changes)):
                yield Advice(text=f'{text}; a "{name}" above 0 avoids it.', changes=changes)
                return
        text += "."
    yield Advice(text=text)


def advise_warmup(case: Case) -> Iterator[Advice]:
    """Warm-up: logarithmic by default; WarmupCosineLR misses its peak."""
    kind, params = case.plan.scheduler.type, case.plan.scheduler.params
    if not kind.startswith("Warmup"):
        return
    steps = params.get("warmup_num_steps", 1000)
    half = _half_way(case.plan) if "warmup_type" not in params and steps > 4 else 0
    if half:
        yield Advice(
            text="The warm-up is logarithmic by default: it is half-way to the peak rate at update "
            f'{half} of {steps}. Most papers mean "warmup_type": "linear".',
            changes={"scheduler.params.warmup_type": "linear"},
        )
    if kind == "WarmupCosineLR" and not params.get("exact_peak"):
        yield Advice(
            text="WarmupCosineLR never reaches the peak rate: its cosine is one update ahead when the warm-up ends. "
            'With "exact_peak": true (ours) it does.',
            changes={"scheduler.params.exact_peak": True},
        )


def advise_loss_scale(case: Case) -> Iterator[Advice]:
    """Loss scale of fp16: its start, hysteresis and window."""
    scaling = case.plan.scaling
    if not isinstance(scaling, DynamicScaling):
        return
    high = ", often too high on purpose" if scaling.initial >= _HIGH_SCALE else ""
    yield Advice(
        text=f"The loss scale starts at {scaling.initial:,.0f}{high}: each overflow skips an update, and the "
        f"scale decreases only at overflow {scaling.hysteresis} (hysteresis). It grows after {scaling.window} clean "
        'updates. "bf16" needs no loss scale, if the device supports it.'
    )


def advise_adam_mode(case: Case) -> Iterator[Advice]:
    """Optimizer "adam": decoupled weight decay, as in DeepSpeed."""
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


def advise_accumulation(case: Case) -> Iterator[Advice]:
    """Traffic of accumulation: stages 0 and 1 can reduce once per step; stage 3 gathers in each micro-step."""
    plan, count = case.plan, case.plan.batch.accumulation
    gradients = sum(f.num_bytes for f in case.sizes.traffic.flows if f.what.startswith(("gradients", "sums")))
    if count == 1 or not gradients or plan.zero.reduce_at.value == "boundary" or reduces_once(plan):
        return
    text = (
        f"With {count} micro-steps gradients are reduced {count} times: {gib(gradients)} of the "
        f"{gib(case.sent_bytes)} that a rank sends in a step."
    )
    if plan.zero.stage == 3:
        yield from _less_accumulation(case, f"{text} Weights are gathered in each micro-step, too.")
        return
    stage = min(plan.zero.stage, 1)
    changes = {"zero_optimization.stage": stage, "zero_optimization.reduce_at": "boundary"}
    for other in case.changed(changes):
        if other.sent_bytes < case.sent_bytes:
            where = f"stage {stage}" if stage != plan.zero.stage else '"reduce_at": "boundary"'
            text += f" In zero_optimization, {where} sends {gib(other.sent_bytes)} and holds {gib(other.held_bytes)} "
            yield Advice(text=f"{text}instead of {gib(case.held_bytes)}.", changes=changes)


def _less_accumulation(case: Case, text: str) -> Iterator[Advice]:
    """Compare with the same batch in one micro-step."""
    micro = case.plan.batch.micro_batch_size * case.plan.batch.accumulation
    changes = {"train_micro_batch_size_per_gpu": micro, "gradient_accumulation_steps": 1}
    for other in case.changed(changes):
        if other.sent_bytes < case.sent_bytes:
            yield Advice(
                text=f"{text} A larger micro-batch sends less, {gib(other.sent_bytes)} without accumulation "
                f"(train_micro_batch_size_per_gpu {micro}); zengine plan prints which one fits.",
                changes=changes,
            )


def advise_bucket_size(case: Case) -> Iterator[Advice]:
    """Bucket size: DeepSpeed's 5e8 suits large models."""
    numel, given = case.plan.zero.bucket_numel, case.sizes.memory
    changes = {"zero_optimization.reduce_bucket_size": None}
    for other in case.changed(changes) if numel else ():
        derived = other.sizes.memory
        if given.total_bytes - derived.total_bytes > given.total_bytes / 50 and derived.buckets < given.buckets:
            yield Advice(
                text=f"reduce_bucket_size {numel:,} costs {gib(given.buckets)} of buffers for this model; "
                f"without the key it follows from the model's size and costs {gib(derived.buckets)}.",
                changes=changes,
            )


def advise_stage(case: Case) -> Iterator[Advice]:
    """Stage: a lower one if it suffices."""
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
        text = (
            f"Stage 3 sends {ratio:.2f} times what stage 2 does ({gib(case.sent_bytes)} and {gib(lower.sent_bytes)}) "
        )
        text += f"and holds {gib(case.held_bytes)} in place of {gib(lower.held_bytes)} beside the activations: "
        is_smaller = case.held_bytes < lower.held_bytes
        verdict = "worth it only if those need the memory." if is_smaller else "stage 2 is better in both."
        yield Advice(text=text + verdict, changes=changes)


def advise_live_parameters(case: Case) -> Iterator[Advice]:
    """Live parameters: DeepSpeed's default of a billion, often written out, limits few models."""
    zero, whole = case.plan.zero, case.sizes.memory.gathered_units
    if zero.stage < 3 or not zero.max_live_numel or not whole:
        return
    changes = {
        "zero_optimization.stage3_max_live_parameters": None,
        "zero_optimization.stage3_max_reuse_distance": None,
    }
    for strict in case.changed(changes):
        if strict.sizes.memory.gathered_units < 0.7 * whole:
            yield Advice(
                text=f"stage3_max_live_parameters {zero.max_live_numel:,} keeps up to {gib(whole)} of weights "
                "gathered for backward. Without it, backward gathers them again: a rank holds "
                f"{gib(strict.held_bytes)} instead of {gib(case.held_bytes)} and sends {gib(strict.sent_bytes)} "
                f"instead of {gib(case.sent_bytes)}.",
                changes=changes,
            )


def advise_offload(case: Case) -> Iterator[Advice]:
    """Offload: memory of the host and files."""
    memory = case.sizes.memory
    count = case.facts.ranks_per_host or min(_RANKS_PER_HOST, case.facts.world_size)
    if memory.host_bytes:
        pinned = sum(size for owner, size in memory.elsewhere.items() if owner.startswith("pinned "))
        locked = f", {gib(pinned * count)} of it page-locked (not swappable)" if pinned else ""
        yield Advice(
            text=f"Offload needs {gib(memory.host_bytes)} of host memory per rank: "
            f"{gib(memory.host_bytes * count)} on a host with {ranks(count)}{locked}."
        )
    if memory.disk_bytes:
        yield Advice(
            text=f"Offload keeps {gib(memory.disk_bytes)} of files per rank: two versions, one of them always valid."
        )


def advise_rounds(case: Case) -> Iterator[Advice]:
    """Rounds of local steps: bytes between the groups, in the step that sends most and on average."""
    plan = case.plan
    make = optimizer_factory(case.module, plan)
    rounds = rounds_of(case.module, plan, world_size=case.num_ranks, optimizer=make)
    if rounds is None or not rounds.flows:
        return
    between = plan.diloco.sync_every // plan.diloco.fragments
    (flow,) = rounds.flows
    yield Advice(
        text=f"diloco: a rank sends {gib(rounds.peak_bytes)} to the other groups in a step, once in {between} steps, "
        f"which is {gib(flow.num_bytes)} in each on average; gradients over all groups would take "
        f"{gib(rounds.plain_bytes)} in each. Outer weights and momentum are "
        f"{gib(sum({**rounds.device, **rounds.elsewhere}.values()))} of a rank's memory, the message included."
    )


def advise_small_parameters(case: Case) -> Iterator[Advice]:
    """Small parameters, which stage 3 does not shard."""
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
    advise_model_parallelism,
    advise_idle_updates,
    advise_warmup,
    advise_loss_scale,
    advise_adam_mode,
    advise_accumulation,
    advise_bucket_size,
    advise_stage,
    advise_live_parameters,
    advise_offload,
    advise_rounds,
    advise_small_parameters,
)


def collect_advice(case: Case) -> tuple[Advice, ...]:
    """Return the advice of all rules."""
    return tuple(advice for rule in RULES for advice in rule(case))


def advice_lines(case: Case) -> tuple[str, ...]:
    """Return the text of each advice, then the notices of the plan."""
    return (*(" ".join(advice.text.split()) for advice in collect_advice(case)), *case.plan.notices)


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else "less than 0.1%"


def _idle(plan: Plan) -> int:
    """Count the first updates with a learning rate of 0."""
    return len(list(itertools.takewhile(lambda rate: rate == 0, itertools.islice(_rates(plan), _FIRST_UPDATES))))


def _half_way(plan: Plan) -> int:
    """Return the update, from 1, at which the rate is half-way to its peak; 0: never, or very late."""
    schedule = _schedule(plan)
    first, peak = (schedule.lrs(t)[0] for t in (0, schedule.warmup_num_steps))
    rates = enumerate(itertools.islice(_rates(plan), _MAX_WARMUP), 1)
    return next((number for number, rate in rates if abs(rate - first) >= abs(peak - first) / 2 > 0), 0)


def _rates(plan: Plan) -> Iterator[float]:
    """Yield the learning rates of the updates; none without a schedule, or if it depends on the loss."""
    if plan.scheduler.type in ("", "ReduceLROnPlateau"):
        return
    schedule = _schedule(plan)
    while True:
        yield float(schedule.optimizer.param_groups[0]["lr"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that no optimizer step precedes
            schedule.step()


def _schedule(plan: Plan) -> Any:
    """Return the schedule of a plan, over a dummy parameter."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kind, options = (plan.optimizer.type, dict(plan.optimizer.params)) if plan.optimizer.type else ("AdamW", {})
        optimizer = zoptim.make_optimizer(kind, [torch.nn.Parameter(torch.zeros(1, 1))], options)
        return zoptim.make_schedule(plan.scheduler.type, optimizer, plan.scheduler.params)
