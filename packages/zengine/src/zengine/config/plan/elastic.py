"""Elastic batch sizes: one batch size that many worlds can train (DeepSpeed's elasticity, versions 0.1 and 0.2).

A job that may shrink and grow keeps its batch size, and so its learning rate, if the batch divides into
micro-batches of an allowed size at every world size.  Candidates are the allowed micro-batch sizes and their least
common multiple, each times the largest highly composite number for which the product stays within the maximum;
highly composite numbers have more divisors than any smaller number.  The candidate with the most world sizes wins.

Version 0.2 counts whole hosts and knows model parallelism; where the present world does not fit the best batch, it
takes the largest batch that does fit.  All functions count data-parallel replicas (DeepSpeed looks up the number of
GPUs in a list of replicas: with model parallelism its worlds are rejected, and its micro-batches too small).

A run keeps one batch, and so its tokens per step, at every world within the limits: where the batch does not divide,
ranks have shares of different sizes (zengine/data/order/uneven.py), which DeepSpeed rejects.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, final

import attrs

from zengine.config.grammar.errors import NOTHING, NOWHERE, Problem
from zengine.config.plan.batch import BatchPlan
from zengine.data.order.uneven import UnevenStep

if TYPE_CHECKING:
    from zengine.config.keys.features import Elasticity
    from zengine.config.plan.parallel import ParallelPlan  # imports torch
    from zengine.config.reading.load import Config

__all__ = [
    "BATCH_KEYS",
    "CHOSEN",
    "ElasticBatch",
    "ElasticTerms",
    "NoElasticBatch",
    "elastic_batch",
    "elastic_notices",
    "most_elastic",
    "solve_elastic",
    "steady_batch",
]

CHOSEN = "elasticity chooses the batch sizes"  # the reason why keys of the batch are rejected
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

# Numbers with more divisors than any smaller one (OEIS A002182).
HIGHLY_COMPOSITE = (
    *(1, 2, 4, 6, 12, 24, 36, 48, 60, 120, 180, 240, 360, 720, 840, 1260, 1680, 2520, 5040, 7560, 10080, 15120),
    *(20160, 25200, 27720, 45360, 50400, 55440, 83160, 110880, 166320, 221760, 277200, 332640, 498960, 554400),
    *(665280, 720720),
)


class NoElasticBatch(ValueError):
    """No batch size fits: the reason."""


@final
@attrs.frozen(kw_only=True)
class ElasticTerms:
    """What a job allows.

    Raises:
        NoElasticBatch: no micro-batch size fits into the maximum.
    """

    max_batch: int  # samples per optimizer step, over all replicas
    micro_batches: tuple[int, ...]  # allowed samples per forward on one rank
    min_ranks: int = 1
    max_ranks: int = 10000
    prefers_larger: bool = True  # of two batches with equally many worlds
    version: float = 0.2
    ranks_per_host: int = 1
    model_parallel_size: int = 1  # ranks that hold one replica

    def __attrs_post_init__(self) -> None:
        if not self.micro_batches or max(self.micro_batches) > self.max_batch:
            raise NoElasticBatch(
                f"every micro-batch size must be at most the batch size {self.max_batch}; "
                f"given are {', '.join(map(str, self.micro_batches)) or 'none'}"
            )
        if self.ranks_per_host % self.model_parallel_size:
            raise NoElasticBatch(
                f"{self.ranks_per_host} ranks per host are not divisible by the model-parallel size "
                f"{self.model_parallel_size}"
            )


@final
@attrs.frozen(kw_only=True)
class ElasticBatch:
    """A batch size and the worlds that can train it."""

    batch: int  # samples per optimizer step
    replicas: tuple[int, ...]  # possible numbers of data-parallel replicas, ascending; () if there is none
    micro_batches: tuple[int, ...]  # allowed ones, descending

    def micro_batch(self, replicas: int) -> int:
        """Return the largest allowed micro-batch size at that number of replicas; 0 if none divides."""
        share, remainder = divmod(self.batch, replicas)
        return 0 if remainder else next((micro for micro in self.micro_batches if share % micro == 0), 0)

    def accumulation(self, replicas: int) -> int:
        """Return the micro-steps per step at that number of replicas; 0 if it is not possible."""
        micro = self.micro_batch(replicas)
        return self.batch // (replicas * micro) if micro else 0


def most_elastic(terms: ElasticTerms) -> ElasticBatch:
    """Return the batch size with the most worlds, by version 0.1, which counts replicas.

    If no candidate has a world within the limits, the batch is the smallest micro-batch, without worlds.
    """
    best = ElasticBatch(batch=min(terms.micro_batches), replicas=(), micro_batches=_descending(terms))
    for batch in sorted(set(_candidates(terms)), reverse=terms.prefers_larger):
        replicas = _worlds(terms, batch)
        if len(replicas) > len(best.replicas):
            best = attrs.evolve(best, batch=batch, replicas=replicas)
    return best


def solve_elastic(terms: ElasticTerms, replicas: int) -> ElasticBatch:
    """Return the batch size of a job that runs with `replicas` at present.

    Version 0.1: independent of `replicas`, which may not be among the result's.  Version 0.2: whole hosts; where
    `replicas` does not fit the best batch, a batch for `replicas` alone.
    """
    if terms.version < 0.2:
        return most_elastic(terms)
    whole = _of_hosts(terms)
    if whole is not None and replicas in whole.replicas:
        return whole
    choose = max if terms.prefers_larger else min
    batches = [terms.max_batch // (micro * replicas) * micro * replicas for micro in terms.micro_batches]
    batches = [batch for batch in batches if batch]
    fitting = choose(batches) if batches else min(terms.micro_batches)
    return ElasticBatch(batch=fitting, replicas=(replicas,) if batches else (), micro_batches=_descending(terms))


def _of_hosts(terms: ElasticTerms) -> ElasticBatch | None:
    """Return the batch that most numbers of whole hosts can train; None if no host can train any."""
    per_host = terms.ranks_per_host // terms.model_parallel_size
    if min(terms.micro_batches) * per_host > terms.max_batch:
        return None
    found = most_elastic(_by_host(terms, per_host))
    replicas = tuple(count * per_host for count in found.replicas)
    return attrs.evolve(found, batch=found.batch * per_host, replicas=replicas) if replicas else None


def _by_host(terms: ElasticTerms, per_host: int) -> ElasticTerms:
    """Return the terms of one replica of each host, which counts hosts."""
    max_batch = terms.max_batch // per_host
    return attrs.evolve(
        terms,
        max_batch=max_batch,
        micro_batches=tuple(micro for micro in terms.micro_batches if micro <= max_batch),
        min_ranks=terms.min_ranks // terms.ranks_per_host,
        max_ranks=terms.max_ranks // terms.ranks_per_host,
    )


def _descending(terms: ElasticTerms) -> tuple[int, ...]:
    return tuple(sorted(set(terms.micro_batches), reverse=True))


def _candidates(terms: ElasticTerms) -> Iterator[int]:
    for base in (*terms.micro_batches, math.lcm(*terms.micro_batches)):
        factors = [factor for factor in HIGHLY_COMPOSITE if factor * base <= terms.max_batch]
        if factors:
            yield factors[-1] * base


def _worlds(terms: ElasticTerms, batch: int) -> tuple[int, ...]:
    """Return the numbers of replicas within the limits that divide the batch into allowed micro-batches."""
    found: set[int] = set()
    for micro in terms.micro_batches:
        if batch % micro == 0:
            found |= set(_divisors(batch // micro))
    return tuple(sorted(count for count in found if terms.min_ranks <= count <= terms.max_ranks))


def _divisors(number: int) -> Sequence[int]:
    low = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return [*low, *(number // factor for factor in low)]


# -- the config ----------------------------------------------------------------------------------


def elastic_batch(config: Config, parallel: ParallelPlan) -> BatchPlan | Problem:
    """Return the batch sizes of the enabled section for the present world, or why there are none.

    A world within the limits that does not divide the batch trains it in uneven shares.
    """
    section, replicas = config.settings.elasticity, parallel.data_ranks
    if problem := _check_section(config) or _check_degrees(config, parallel):
        return problem
    try:
        found = steady_batch(terms_of(section), replicas)
    except NoElasticBatch as error:
        return _problem(config, "micro_batch_sizes", list(section.micro_batch_sizes), str(error), "")
    if replicas in found.replicas and found.micro_batch(replicas):
        return BatchPlan(
            train_batch_size=found.batch,
            micro_batch_size=found.micro_batch(replicas),
            accumulation=found.accumulation(replicas),
            replicas=replicas,
        )
    reason = _even_only(config, parallel)
    if found.replicas and not reason:
        step = UnevenStep.within(found.batch, replicas, max(found.micro_batches))
        return BatchPlan(
            train_batch_size=step.batch,
            micro_batch_size=step.most,
            accumulation=step.accumulation,
            replicas=replicas,
        )
    even = f", and shares are equal, because {reason}" if reason else ""
    return _problem(
        config,
        "",
        NOTHING,
        f"{replicas} replicas cannot train a batch of {found.batch} samples in micro-batches of "
        f"{', '.join(map(str, found.micro_batches))}{even}",
        _nearest(found.replicas, replicas),
    )


def steady_batch(terms: ElasticTerms, replicas: int) -> ElasticBatch:
    """Return the batch that all worlds within the limits train, evenly or not; elsewhere that of `solve_elastic`.

    Version 0.2 of DeepSpeed trains another batch, with another number of tokens, where a world does not fit the best.
    """
    if terms.version < 0.2 or not terms.min_ranks <= replicas * terms.model_parallel_size <= terms.max_ranks:
        return solve_elastic(terms, replicas)
    return _of_hosts(terms) or solve_elastic(terms, replicas)


def _even_only(config: Config, parallel: ParallelPlan) -> str:
    """Return the reason why every rank needs as many samples as any other; "" if there is none."""
    from zengine.config.plan.data import data_plan  # not at the top: other commands start without torch

    settings, ranks = config.settings, parallel.data_ranks * config.settings.elasticity.model_parallel_size
    section = settings.elasticity
    reasons = {
        f"{ranks} ranks are not within {section.min_gpus} (min_gpus) and {section.max_gpus} (max_gpus)": not (
            section.min_gpus <= ranks <= section.max_gpus
        ),
        "pipeline stages exchange batches of one size": parallel.degrees.pipeline > 1,
        "groups of diloco train by themselves": settings.diloco.sync_every > 0,
        "managed_gradient_accumulation is off": not settings.managed_gradient_accumulation,
        "a data section chooses the samples of each batch": bool(data_plan(config).needs_data),
    }
    return next((reason for reason, is_true in reasons.items() if is_true), "")


def elastic_notices(config: Config, parallel: ParallelPlan) -> list[str]:
    """Return notices of keys of the batch that elasticity overrides, of uneven shares, of a batch of one world."""
    section, replicas = config.settings.elasticity, parallel.data_ranks
    if not section.enabled:
        return []
    given = [key for key in BATCH_KEYS if key in config.given] if section.ignore_non_elastic_batch_info else []
    notices = [f"{config.origin(key)}: {key} has no effect here: elasticity chooses it" for key in given]
    found = steady_batch(terms_of(section), replicas)
    if replicas not in found.replicas:
        step = UnevenStep.within(found.batch, replicas, max(found.micro_batches))
        notices.append(
            f"{config.origin('elasticity.enabled')}: elasticity: {replicas} replicas do not divide the batch of "
            f"{found.batch} samples into allowed micro-batches, so each takes at most {step.most} samples in each of "
            f"{step.accumulation} micro-steps, weighted by their number"
        )
    ranks = replicas * section.model_parallel_size
    if section.version > 0.1 and found.replicas == (replicas,) and section.min_gpus != section.max_gpus:
        notices.append(
            f"{config.origin('elasticity.enabled')}: elasticity: {ranks} ranks ({section.num_gpus_per_node} a host) "
            f"do not fit the batch that most worlds can train; {found.batch} samples are the batch of this world "
            "alone, and another world has another batch"
        )
    return notices


def terms_of(section: Elasticity) -> ElasticTerms:
    """Return the terms of a section.  Raises NoElasticBatch."""
    return ElasticTerms(
        max_batch=section.max_train_batch_size,
        micro_batches=section.micro_batch_sizes,
        min_ranks=section.min_gpus,
        max_ranks=section.max_gpus,
        prefers_larger=section.prefer_larger_batch,
        version=section.version,
        ranks_per_host=section.num_gpus_per_node,
        model_parallel_size=section.model_parallel_size,
    )


def _check_section(config: Config) -> Problem | None:
    section = config.settings.elasticity
    for key in ("max_train_batch_size", "micro_batch_sizes"):
        if not getattr(section, key):
            return _problem(config, "", NOTHING, f"{key} is missing", f'Add "{key}" to the section.')
    if section.min_gpus > section.max_gpus:
        return _problem(
            config, "min_gpus", section.min_gpus, f"it exceeds max_gpus ({section.max_gpus})", "Exchange the two."
        )
    if section.model_parallel_size > 1 and section.version < 0.2:
        return _problem(
            config, "model_parallel_size", section.model_parallel_size, "version 0.1 counts ranks", "Use version 0.2."
        )
    given = [key for key in BATCH_KEYS if key in config.given and key not in config.autos]
    if given and not section.ignore_non_elastic_batch_info:
        return Problem(
            place=config.given[given[0]],
            key=given[0],
            given=getattr(config.settings, given[0]),
            reason=CHOSEN,
            suggestion=f"Remove {', '.join(given)}, or set elasticity.ignore_non_elastic_batch_info to true.",
        )
    return None


def _check_degrees(config: Config, parallel: ParallelPlan) -> Problem | None:
    """Compare model_parallel_size with the ranks that hold one replica by the config's own degrees."""
    section, found = config.settings.elasticity, parallel.model_parallel_size * parallel.degrees.sequence
    expected = section.model_parallel_size
    if found == expected or (section.version < 0.2 and expected == 1):
        return None
    names = {"tensor": parallel.degrees.tensor, "pipeline": parallel.degrees.pipeline}
    names["sequence"] = parallel.degrees.sequence
    degrees = " x ".join(f"{name} {degree}" for name, degree in names.items() if degree > 1)
    return _problem(
        config,
        "model_parallel_size",
        expected,
        f"one replica of this config has {found} {'rank' if found == 1 else 'ranks'}"
        + (f" ({degrees})" if degrees else " (no key splits the model or its sequences)"),
        f"Set it to {found}, or change the degrees.",
    )


def _nearest(counts: Sequence[int], replicas: int) -> str:
    if not counts:
        return "No number of replicas between min_gpus and max_gpus can: allow other micro_batch_sizes."
    below = [count for count in counts if count < replicas][-1:]
    above = [count for count in counts if count > replicas][:1]
    nearest = " or ".join(str(count) for count in below + above)
    return f"Start {nearest} replicas; all that can: {', '.join(map(str, counts))}."


def _problem(config: Config, key: str, given: object, reason: str, suggestion: str) -> Problem:
    path = f"elasticity.{key}" if key else "elasticity"
    place = config.given.get(path, config.given.get("elasticity.enabled", NOWHERE))
    return Problem(place=place, key=path, given=given, reason=reason, suggestion=suggestion)
