"""ZeRO plan: the policy for zpartition, from the config, the machine and the degrees of parallelism.

Offload: without a GPU everything is on the CPU already, so "cpu" has no effect.  "nvme" means files on any machine.

ZeRO++: weights are gathered in 8 bits and gradients reduced in 4, as in the paper.  Gradients are summed first within
and then between nodes; the size of a node is `zero_hpz_partition_size`, else the launcher's local world size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.root import Settings
from zengine.config.keys.zero import MEASURED, Aio, LeafModule, LoCo, OffloadOptimizer, OffloadParam, ZenFlow, Zero
from zengine.config.plan.facts import Facts
from zengine.config.plan.parallel import ParallelPlan
from zengine.config.plan.precision import wire_dtypes
from zengine.config.plan.rows import PlanRow, planned, rows
from zengine.config.reading.load import Config
from zpartition import (
    Averaging,
    BucketSizing,
    ColumnMoments,
    Offload,
    ReduceAt,
    SelectivePolicy,
    SparseGradients,
    Speculation,
    Tier,
    ZeroPolicy,
)
from zprecision import Precision

__all__ = [
    "averaging_notices",
    "check_secondary_group_size",
    "check_shard_group_size",
    "leaf_modules",
    "offload_devices",
    "offload_notices",
    "reduce_at",
    "selective_policy",
    "stage_3_keys",
    "zenflow_rows",
    "zero_policy",
    "zero_rows",
]

WEIGHT_BITS, GRADIENT_BITS = 8, 4
DEEPSPEEDS_LIMIT = 1_000_000_000  # elements: its default of max_live_parameters and max_reuse_distance
SECONDARY = "zero_optimization.zero_hpz_partition_size"
_TUNING = "zero_optimization.offload_optimizer."


# -- the policy ----------------------------------------------------------------------------------


def zero_policy(
    settings: Settings, dtypes: Precision, facts: Facts, parallel: ParallelPlan, accumulation: int
) -> ZeroPolicy:
    """Return the policy: the values of zero_optimization whose rows name a field, and the derived ones.

    accumulation: micro-steps of a step.
    """
    zero = settings.zero_optimization
    is_measured = zero.reduce_bucket_size == MEASURED
    derived = {
        "bucket_numel": 0 if is_measured else zero.reduce_bucket_size,
        "bucket_sizing": BucketSizing.MEASURED if is_measured else BucketSizing.DERIVED,
        "accumulate_dtype": dtypes.accumulate,
        "master_dtype": dtypes.master,
        "averaging": _averaging(settings),
        **_whole_units(zero),
        "reduce_at": reduce_at(zero.stage, accumulation, zero.reduce_at),
        "sparse_gradients": SparseGradients.ROWS if settings.sparse_gradients else SparseGradients.DENSE,
        "shard_group_size": _shard_group_size(settings, parallel),
        "offload": _offload(settings, facts),
        "leaves": (
            *zero.leaf_module.classes,
            *zero.leaf_module.names,
            *(f"*{end}" for end in zero.leaf_module.name_suffixes),
        ),
        **wire_dtypes(settings),
        **_zeropp_fields(zero, facts, parallel),
    }
    return ZeroPolicy(**planned(zero, ZeroPolicy, **derived))


def reduce_at(stage: int, accumulation: int, given: str = "") -> ReduceAt:
    """Return when gradients are reduced, if zero_optimization.reduce_at is `given` ("": not).

    Once per step where a rank may keep its own whole gradients meanwhile: the traffic is 1 / accumulation.  A single
    micro-step is reduced in the buckets of its weights' dtype.
    """
    if given:
        return ReduceAt(given)
    return ReduceAt.BOUNDARY if stage < 2 and accumulation > 1 else ReduceAt.MICRO_STEP


def _averaging(settings: Settings) -> Averaging:
    """Return the division by the number of replicas, where one key overrides others as in DeepSpeed."""
    is_mean = settings.gradient_allreduce_op == "mean"
    divides_before = is_mean and settings.prescale_gradients
    return Averaging(
        operation=settings.gradient_allreduce_op,
        prescale=divides_before,
        predivide=settings.gradient_predivide_factor if is_mean and not divides_before else 1.0,
    )


def averaging_notices(config: Config) -> list[str]:
    """Return notices of keys that divide gradients and are overridden by another key."""
    settings, used = config.settings, _averaging(config.settings)
    values = {"prescale_gradients": used.prescale, "gradient_predivide_factor": used.predivide}
    idle = [key for key, value in values.items() if getattr(settings, key) != value]
    why = "prescale_gradients divides before the sum" if used.prescale else 'gradient_allreduce_op is "sum"'
    return [f"{config.origin(key)}: {key} has no effect here: {why}" for key in idle]


def _shard_group_size(settings: Settings, parallel: ParallelPlan) -> int:
    """Return the ranks per sharded copy: the key, or derived from a mesh with a `replicate` axis."""
    zero = settings.zero_optimization
    if zero.shard_group_size or not zero.stage or parallel.degrees.replicate == 1 or parallel.independent_replicas:
        return zero.shard_group_size
    return parallel.gradient_ranks // parallel.degrees.replicate


def leaf_modules(settings: Settings) -> dict[str, tuple[str, ...]]:
    """Return the names of leaf modules as given."""
    leaves = settings.zero_optimization.leaf_module
    return {"classes": leaves.classes, "names": leaves.names, "name_suffixes": leaves.name_suffixes}


def offload_devices(settings: Settings) -> dict[str, str]:
    """Return the device of each offload section, by name; weights are offloaded at stage 3 only."""
    zero = settings.zero_optimization
    weights = zero.offload_param.device if zero.stage == 3 else "none"
    return {"offload_optimizer": zero.offload_optimizer.device, "offload_param": weights}


def _offload(settings: Settings, facts: Facts) -> Offload:
    """Return the offload policy; `rules` have checked the paths."""
    zero, devices = settings.zero_optimization, offload_devices(settings)
    states, weights = zero.offload_optimizer, zero.offload_param
    tier = _states_tier(zero, facts)
    folders = {"offload_optimizer": states.nvme_path, "offload_param": weights.nvme_path}
    speculates = states.super_offload and tier is Tier.HOST
    derived = {
        "states": tier,
        "weights": _tier(devices["offload_param"], facts),
        "step_numel": zero.sub_group_size,
        "buffer_count": max(2, states.buffer_count),
        "pin": states.pin_memory if tier is Tier.HOST or zero.stage < 3 else weights.pin_memory,
        "directory": next((folders[name] for name, device in devices.items() if device == "nvme"), ""),
        "speculation": Speculation.LAST_BACKWARD if speculates else Speculation.OFF,
        "selective": selective_policy(zero.zenflow),
    }
    return Offload(
        **{**planned(settings.aio, Offload), **planned(weights, Offload), **planned(states, Offload, **derived)}
    )


def selective_policy(zenflow: ZenFlow, steps_per_epoch: int = 0) -> SelectivePolicy:
    """Return the policy of ZenFlow.

    steps_per_epoch: of the training data, used if the section has none; 0: unknown, so columns are selected once.

    Raises:
        ValueError: the interval of an update is longer than that of a selection.
    """
    if not zenflow.topk_ratio:
        return SelectivePolicy()
    unit = 1 if zenflow.select_strategy == "step" else zenflow.steps_per_epoch or steps_per_epoch
    every = (zenflow.select_interval or 1) * unit
    moments = ColumnMoments.HOST if zenflow.offload else ColumnMoments.DEVICE
    return SelectivePolicy(**planned(zenflow, SelectivePolicy, select_every=every, moments=moments))


def _states_tier(zero: Zero, facts: Facts) -> Tier:
    """Return the place of masters and states; ZenFlow keeps them apart from the weights without a GPU, too."""
    is_apart = zero.zenflow.topk_ratio > 0 and zero.offload_optimizer.device == "cpu"
    return Tier.HOST if is_apart else _tier(zero.offload_optimizer.device, facts)


def _tier(device: str, facts: Facts) -> Tier:
    if device == "nvme":
        return Tier.DISK
    return Tier.HOST if device == "cpu" and facts.device_type != "cpu" else Tier.DEVICE


def _whole_units(zero: Zero) -> dict[str, int | None]:
    """Return the limits of whole units: with either key, DeepSpeed's default holds for the other."""
    live, distance = zero.stage3_max_live_parameters, zero.stage3_max_reuse_distance
    if live is None and distance is not None:
        live = DEEPSPEEDS_LIMIT
    return {"max_live_numel": live, "max_reuse_numel": DEEPSPEEDS_LIMIT if distance is None else distance}


def _zeropp_fields(zero: Zero, facts: Facts, parallel: ParallelPlan) -> dict[str, Any]:
    """Return the policy's ZeRO++ fields; all zero below stage 3."""
    names = ("weight_bits", "frozen_weight_bits", "secondary_group_size", "gradient_bits", "gradient_hop_size")
    if zero.stage < 3:
        return dict.fromkeys(names, 0)
    here = facts.ranks_per_host // parallel.degrees.tensor  # tensor ranks are neighbours
    node = zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else here
    fits = _copy_size(zero, parallel) % max(node, 1) == 0
    values = (
        WEIGHT_BITS * zero.zero_quantized_weights,
        WEIGHT_BITS * zero.zero_quantized_nontrainable_weights,
        zero.zero_hpz_partition_size * (zero.zero_hpz_partition_size > 1),
        GRADIENT_BITS * zero.zero_quantized_gradients,
        node * (zero.zero_quantized_gradients and fits),
    )
    feedback = zero.zeropp_loco_param if zero.zero_quantized_gradients else LoCo()
    return {**dict(zip(names, values)), **planned(feedback, ZeroPolicy)}


def _copy_size(zero: Zero, parallel: ParallelPlan) -> int:
    """Return the number of ranks over which weights are sharded."""
    return zero.shard_group_size or parallel.gradient_ranks


# -- the table -----------------------------------------------------------------------------------


def zero_rows(
    policy: ZeroPolicy, offloads: Mapping[str, str], leaf_modules: Mapping[str, tuple[str, ...]], full_masters: bool
) -> Iterator[PlanRow]:
    """Yield the rows of zero_optimization and aio."""
    home = "zero_optimization."
    bucket = MEASURED if policy.bucket_sizing is BucketSizing.MEASURED else policy.bucket_numel
    yield from rows(home, policy, Zero, load_from_fp32_weights=full_masters, reduce_bucket_size=bucket)
    yield from rows(f"{home}zeropp_loco_param.", policy, LoCo)
    yield from rows(f"{home}leaf_module.", policy, LeafModule, **_all_names(leaf_modules))
    yield from rows(
        f"{home}offload_optimizer.",
        policy.offload,
        OffloadOptimizer,
        device=offloads.get("offload_optimizer", "none"),
        super_offload=policy.offload.speculation is not Speculation.OFF,
    )
    yield from rows(
        f"{home}offload_param.", policy.offload, OffloadParam, device=offloads.get("offload_param", "none")
    )
    yield from rows("aio.", policy.offload, Aio)


def zenflow_rows(zenflow: ZenFlow) -> Iterator[PlanRow]:
    """Yield the rows of zero_optimization.zenflow."""
    written = {field.name: getattr(zenflow, field.name) for field in attrs.fields(ZenFlow)}
    yield from rows("zero_optimization.zenflow.", zenflow, ZenFlow, switches=("topk_ratio",), **written)


def _all_names(leaf_modules: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    return {field.name: leaf_modules.get(field.name, ()) for field in attrs.fields(LeafModule)}


# -- rules and notices ---------------------------------------------------------------------------


def check_shard_group_size(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Require that shard_group_size divides the ranks that share the model."""
    size, key = config.settings.zero_optimization.shard_group_size, "zero_optimization.shard_group_size"
    ranks = parallel.gradient_ranks
    if not size or ranks % size == 0:
        return []
    divisors = [str(number) for number in range(1, ranks + 1) if ranks % number == 0]
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=size,
            reason=f"it does not divide the {ranks} ranks that share this model",
            suggestion=f"Choose one of {', '.join(divisors)}, or 0 for one group of all.",
        )
    ]


def check_secondary_group_size(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Require that zero_hpz_partition_size divides the ranks of a copy; not checked on a single rank."""
    zero = config.settings.zero_optimization
    size, total = zero.zero_hpz_partition_size, _copy_size(zero, parallel)
    if zero.stage < 3 or total == 1 or total % size == 0:
        return []
    allowed = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
    return [
        Problem(
            place=config.given.get(SECONDARY, NOWHERE),
            key=SECONDARY,
            given=size,
            reason=f"it does not divide the {total} ranks that hold one copy of the weights",
            suggestion=f"Choose one of {allowed}: the ranks of a node, or 1 for no secondary shards.",
        )
    ]


def stage_3_keys(config: Config) -> list[str]:
    """Return the given keys of features that only stage 3 has."""
    zero = config.settings.zero_optimization
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
        "zeropp_loco_param.err_beta": zero.zeropp_loco_param.err_beta < 1,
    }
    return [f"zero_optimization.{key}" for key, is_asked in asked.items() if is_asked and zero.stage < 3]


def feedback_notices(config: Config) -> list[str]:
    """Return a notice of error feedback without quantized gradients."""
    zero, key = config.settings.zero_optimization, "zero_optimization.zeropp_loco_param"
    given = [name for name in config.given if name.startswith(f"{key}.")]
    if zero.stage < 3 or not given or (zero.zero_quantized_gradients and zero.zeropp_loco_param.err_beta < 1):
        return []
    why = "err_beta is 1" if zero.zero_quantized_gradients else "zero_quantized_gradients is off"
    return [f"{config.origin(given[0])}: {key} has no effect here: {why}"]


def offload_notices(config: Config, facts: Facts) -> list[str]:
    """Return notices of keys of ZeRO's memory and files without effect on this machine or in this combination."""
    moved = _states_tier(config.settings.zero_optimization, facts)
    idle = [
        *_idle_devices(config, facts),
        *_idle_optimizer_keys(config, moved),
        *_idle_weight_keys(config, facts, moved),
    ]
    notices = [f"{config.origin(place)}: {key} has no effect here: {reason}" for key, place, reason in idle]
    if moved is Tier.DISK and config.settings.zero_optimization.offload_optimizer.buffer_count < 2:
        key = f"{_TUNING}buffer_count"
        notices.append(f"{config.origin(key)}: {key} = 1 counts as 2: one is read while another is updated")
    return notices


_Idle = Iterator[tuple[str, str, str]]  # key without effect, key whose origin is printed, reason


def _idle_devices(config: Config, facts: Facts) -> _Idle:
    zero = config.settings.zero_optimization
    if zero.stage < 3 and zero.offload_param.device != "none":
        key = "zero_optimization.offload_param"
        yield (
            key,
            f"{key}.device",
            f"weights are sharded, and offloaded, from stage 3 on (stage is {zero.stage})",
        )
    for name, device in offload_devices(config.settings).items():
        is_apart = name == "offload_optimizer" and _states_tier(zero, facts) is Tier.HOST
        if device == "cpu" and facts.device_type == "cpu" and not is_apart:
            key = f"zero_optimization.{name}.device"
            yield key, key, "this run computes on the CPU, so everything is on the CPU already"


def _idle_optimizer_keys(config: Config, moved: Tier) -> _Idle:
    """Yield keys that tune an offload of the optimizer which does not happen, or happens elsewhere."""
    zero = config.settings.zero_optimization
    tuned = {"sub_group_size": "zero_optimization.sub_group_size", "super_offload": f"{_TUNING}super_offload"}
    tuned |= {key: f"{_TUNING}{key}" for key in ("ratio", "pin_memory", "buffer_count", "cpuadam_cores_perc")}
    tuned["aio"] = next((key for key in config.given if key.startswith("aio.")), "aio")
    idle = {
        Tier.DEVICE: list(tuned),
        Tier.HOST: ["buffer_count", "aio"],
        Tier.DISK: ["super_offload", "pin_memory", "cpuadam_cores_perc"],
    }
    for key in (tuned[name] for name in idle[moved] if tuned[name] in config.given):
        if offload_devices(config.settings)["offload_param"] == "nvme" and key == tuned["aio"]:
            continue
        where = "is not offloaded" if moved is Tier.DEVICE else f"is offloaded to {zero.offload_optimizer.device}"
        yield key, key, f"the optimizer {where}"
    key = tuned["cpuadam_cores_perc"]
    if moved is Tier.HOST and key in config.given and not zero.offload_optimizer.super_offload:
        yield key, key, "super_offload is off"


def _idle_weight_keys(config: Config, facts: Facts, moved: Tier) -> _Idle:
    """Yield keys of paths, of offloaded weights and of their gathers that do nothing in this combination."""
    zero = config.settings.zero_optimization
    for name in offload_devices(config.settings):
        key, device = f"zero_optimization.{name}.nvme_path", getattr(zero, name).device
        if key in config.given and getattr(zero, name).nvme_path and device != "nvme":
            yield key, key, f'{name}.device is "{device}"'
    key = "zero_optimization.offload_param.pin_memory"
    is_idle = moved is Tier.HOST or _tier(zero.offload_param.device, facts) is not Tier.HOST
    if zero.stage == 3 and key in config.given and is_idle:
        decides = f"{_TUNING}pin_memory decides" if moved is Tier.HOST else "the weights are not on the host"
        yield key, key, decides
    for key in (f"zero_optimization.offload_param.{name}" for name in ("max_in_cpu", "buffer_count", "buffer_size")):
        if key in config.given and zero.offload_param.device == "cpu":
            yield key, key, "the weights are not on nvme"
    key = "zero_optimization.allgather_bucket_size"
    if key in config.given and not zero.stage:
        yield key, key, "stage 0 gathers no weights"
