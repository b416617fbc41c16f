"""`deepspeed.elasticity.elasticity`: the elastic batch size of a config, as schedulers of jobs compute it.

The arithmetic is `zengine.config.plan.elastic`.  As with DeepSpeed, `world_size` of `compute_elastic_config` counts
ranks; here a world with model parallelism is accepted if its replicas are among the results.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from zengine.config.plan.elastic import ElasticTerms, NoElasticBatch, solve_elastic
from zengine.deepspeed.elasticity.config import (
    ElasticityConfig,
    ElasticityConfigError,
    ElasticityError,
    ElasticityIncompatibleWorldSize,
)
from zengine.deepspeed.elasticity.constants import (
    DEEPSPEED_ELASTICITY_CONFIG,
    ELASTICITY,
    ENABLED,
    ENABLED_DEFAULT,
    LATEST_ELASTICITY_VERSION,
    MINIMUM_DEEPSPEED_VERSION,
)

__all__ = ["compute_elastic_config", "elasticity_enabled", "ensure_immutable_elastic_config"]

log = logging.getLogger("zengine")


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the config has the section, enabled."""
    return bool(ds_config.get(ELASTICITY, {}).get(ENABLED, ENABLED_DEFAULT))


def ensure_immutable_elastic_config(runtime_elastic_config_dict: Mapping[str, Any]) -> None:
    """Compare the section with the one that a scheduler put into the environment, if it did.

    Raises:
        ElasticityConfigError: batch sizes or version differ, or the variable is no JSON object.
    """
    text = os.environ.get(DEEPSPEED_ELASTICITY_CONFIG)
    if text is None:
        log.info("%s is not set: nothing to compare elasticity with", DEEPSPEED_ELASTICITY_CONFIG)
        return
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ElasticityConfigError(
            f"{DEEPSPEED_ELASTICITY_CONFIG} is not JSON: {error}. The scheduler must set it to the section."
        ) from None
    if not isinstance(found, Mapping):
        raise ElasticityConfigError(f"{DEEPSPEED_ELASTICITY_CONFIG} = {text!r}: needs the section as a JSON object")
    scheduled, here = ElasticityConfig(found), ElasticityConfig(runtime_elastic_config_dict)
    for name in ("max_acceptable_batch_size", "micro_batches", "version"):
        seen, present = getattr(scheduled, name), getattr(here, name)
        if seen != present:
            raise ElasticityConfigError(
                f"elasticity: {name} is {present!r} in this config and {seen!r} in {DEEPSPEED_ELASTICITY_CONFIG}, "
                "which the scheduler of the job has set. Start the job with the same config."
            )


def compute_elastic_config(
    ds_config: dict[str, Any],
    target_deepspeed_version: str,
    world_size: int = 0,
    return_microbatch: bool = False,
    *,
    return_accumulation: bool = False,
) -> tuple[Any, ...]:
    """Return (batch size, numbers of replicas that can train it), and the micro-batch size if one is asked for.

    world_size: ranks of the job; 0: unknown, or WORLD_SIZE of the environment for version 0.2.  If it is given, the
        result has the micro-batch size.
    return_microbatch: return the micro-batch size; needs a world.
    return_accumulation: ours: return a dict as the last value, with the micro-steps of a step by number of replicas.
        (An engine also trains the batch at other numbers of replicas within the limits, in uneven shares.)

    Raises:
        ValueError: `ds_config` is no dict, or no micro-batch size fits into the maximum.
        ElasticityConfigError: the section is absent, disabled or wrong, or there is no world to compute for.
        ElasticityError: `target_deepspeed_version` has no elasticity.
        ElasticityIncompatibleWorldSize: `world_size` cannot train the batch.
    """
    config = _section_of(ds_config)
    _check_version(target_deepspeed_version)
    ranks = world_size or _world_of_environment(config, needs_world=return_microbatch)
    replicas = max(ranks // config.model_parallel_size, 1)
    try:
        found = solve_elastic(_terms_of(config), replicas)
    except NoElasticBatch as error:
        raise (ElasticityError if config.num_gpus_per_node % config.model_parallel_size else ValueError)(
            f"elasticity: {error}"
        ) from None
    counts = list(found.replicas)
    more = ({count: found.accumulation(count) for count in counts},) if return_accumulation else ()
    if not world_size and not return_microbatch:
        return found.batch, counts, *more
    if world_size and replicas not in counts:
        raise ElasticityIncompatibleWorldSize(
            f"World size ({world_size}) is not valid with the current list of valid GPU counts: {counts}"
        )
    micro = found.micro_batch(replicas)
    if not micro:
        raise ElasticityIncompatibleWorldSize(
            f"no micro-batch size of {config.micro_batches} divides {found.batch} samples over {replicas} replicas; "
            f"valid counts: {counts}"
        )
    return found.batch, counts, micro, *more


def _section_of(ds_config: Any) -> ElasticityConfig:
    if not isinstance(ds_config, dict):
        raise ValueError(f"ds_config must be a dict, and it is {type(ds_config).__name__}: {ds_config!r}")
    if ELASTICITY not in ds_config:
        raise ElasticityConfigError('"elasticity" is missing in the config. Add the section for an elastic job.')
    if not elasticity_enabled(ds_config):
        raise ElasticityConfigError('elasticity is disabled. Set "enabled": true in the section.')
    config = ElasticityConfig(ds_config[ELASTICITY])
    try:
        version = float(config.version)
    except (TypeError, ValueError):
        version = 0.0
    if version not in (0.1, 0.2):
        raise ElasticityConfigError(
            f"elasticity.version = {config.version}: there are 0.1 and {LATEST_ELASTICITY_VERSION}"
        )
    if config.model_parallel_size > 1 and version != 0.2:
        raise ElasticityConfigError(
            f"elasticity.model_parallel_size = {config.model_parallel_size} needs version 0.2; version is {version}"
        )
    return config


def _check_version(target: str) -> None:
    if _numbers(target) < _numbers(MINIMUM_DEEPSPEED_VERSION):
        raise ElasticityError(
            f"DeepSpeed {target} has no elasticity; the first version with it is {MINIMUM_DEEPSPEED_VERSION}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:3] if part.isdigit())


def _world_of_environment(config: ElasticityConfig, *, needs_world: bool) -> int:
    if float(config.version) == 0.1 and not needs_world:
        return 1  # the result does not depend on it
    text = os.environ.get("WORLD_SIZE", "")
    if not text.isnumeric():
        raise ElasticityConfigError(
            "elasticity version 0.2, and any micro-batch size, depend on the world: pass world_size=, or set "
            f"WORLD_SIZE, which is {text or 'not set'}"
        )
    return int(text)


def _terms_of(config: ElasticityConfig) -> ElasticTerms:
    return ElasticTerms(
        max_batch=config.max_acceptable_batch_size,
        micro_batches=tuple(config.micro_batches),
        min_ranks=config.min_gpus,
        max_ranks=config.max_gpus,
        prefers_larger=config.prefer_larger_batch_size,
        version=float(config.version),
        ranks_per_host=config.num_gpus_per_node,
        model_parallel_size=config.model_parallel_size,
    )
