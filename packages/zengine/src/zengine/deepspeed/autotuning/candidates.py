"""Configs that a tuner may run: ZeRO stages, micro-batches and the lists of a config, without those that do not fit.

A config's `zero_optimization.stage` names the stages to try: a number, a list, or "all", which is also what a config
without the key means.  `train_micro_batch_size_per_gpu` may be a list; otherwise the largest sizes that fit are
tried, halved each time.  Any other key of `zero_optimization` may hold a list of values.  The samples of a step stay
those of `max_train_batch_size` or `train_batch_size`, if one is given, by accumulation.

What fits, and what a step sends, comes from the profile of the model (features/trial_run.py).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from zengine.config import ConfigError, Facts, load, resolve
from zengine.config.keys.autotuning import Autotuning

__all__ = ["Candidate", "ModelFacts", "StageFacts", "list_candidates", "why_rejected"]

STAGES = (0, 1, 2, 3)
_ZERO, _MICRO, _STEPS, _BATCH = (
    "zero_optimization",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "train_batch_size",
)
_UNKNOWN_SIZES = 5  # doublings that are tried where the largest micro-batch is not known


@attrs.frozen(kw_only=True)
class StageFacts:
    """What the planner says about one stage."""

    largest_micro_batch: int  # samples; 0: none fits
    sent_bytes: Sequence[int]  # by one rank in a step of one micro-batch, and of two

    def step_bytes(self, accumulation: int) -> int:
        """Return the bytes that a rank sends in a step."""
        one, two = self.sent_bytes
        return one if accumulation == 1 else two + (accumulation - 2) * (two - one)


@attrs.frozen(kw_only=True)
class ModelFacts:
    """Facts that the profile run has written; without `stages` the planner could not run the model."""

    num_params: int
    replicas: int  # ranks that read data of their own
    stages: Mapping[int, StageFacts]
    device: str = "cpu"  # type of the ranks' device
    reason: str = ""  # why there are no stages

    @classmethod
    def of(cls, written: Mapping[str, Any], num_ranks: int) -> ModelFacts:
        """Return the facts of a profile's JSON."""
        rows = {
            row["stage"]: StageFacts(
                largest_micro_batch=row["largest_micro_batch"], sent_bytes=tuple(row["sent_bytes"])
            )
            for row in written.get("stages", ())
        }
        return cls(
            num_params=written["num_params"],
            replicas=written.get("replicas", num_ranks),
            stages=rows,
            device=written.get("device", "cpu"),
            reason=written.get("reason", ""),
        )


@attrs.frozen(kw_only=True)
class Candidate:
    """One config to try."""

    stage: int
    micro_batch: int
    accumulation: int
    replicas: int
    others: Mapping[str, Any]  # keys of zero_optimization with one value of their lists
    step_bytes: int  # that a rank sends; 0: not known

    @property
    def name(self) -> str:
        """Name of its experiment, as DeepSpeed writes it."""
        extra = "".join(f"_{key}{value}" for key, value in self.others.items())
        return f"z{self.stage}_gas{self.accumulation}_tmbspg{self.micro_batch}{extra}".replace("/", "-")

    @property
    def sample_bytes(self) -> float:
        """Bytes that a rank sends for one of its samples."""
        return self.step_bytes / (self.micro_batch * self.accumulation)

    def config(self, user: Mapping[str, Any]) -> dict[str, Any]:
        """Return the user's config with this candidate's values."""
        found = copy.deepcopy(dict(user))
        found[_ZERO] = {**_zero(user), **self.others, "stage": self.stage}
        found[_MICRO], found[_STEPS] = self.micro_batch, self.accumulation
        found[_BATCH] = self.micro_batch * self.accumulation * self.replicas
        return found


def list_candidates(user: Mapping[str, Any], keys: Autotuning, facts: ModelFacts) -> list[Candidate]:
    """Return the candidates that fit, in the order of their bytes for a sample, the higher stage first of equals.

    user: the config as it is written.  Raises ValueError for a stage, or a size, that is none, and for a
    batch that the ranks do not divide.
    """
    lists = {key: value for key, value in _zero(user).items() if isinstance(value, list) and key != "stage"}
    choices = [dict(zip(lists, values)) for values in itertools.product(*lists.values())]
    found = [
        Candidate(
            stage=stage,
            micro_batch=size,
            accumulation=accumulation,
            replicas=facts.replicas,
            others=others,
            step_bytes=facts.stages[stage].step_bytes(accumulation) if stage in facts.stages else 0,
        )
        for stage in _stages(user, facts)
        for size in _sizes(user, keys, facts, stage)
        for accumulation in _accumulations(user, keys, facts, size)
        for others in choices
    ]
    return sorted(found, key=lambda each: (each.sample_bytes, -each.stage))


def why_rejected(config: Mapping[str, Any], num_ranks: int, replicas: int, device: str) -> str:
    """Return why a config is rejected, in one line; "" if it is accepted, or has values that the script fills in."""
    if "auto" in _values(config):
        return ""
    try:
        resolve(load(dict(config)), Facts(world_size=num_ranks, replicas=replicas, device_type=device))
    except ConfigError as error:
        return "; ".join(str(problem) for problem in error.problems)
    return ""


def _zero(user: Mapping[str, Any]) -> Mapping[str, Any]:
    section = user.get(_ZERO)
    return section if isinstance(section, Mapping) else {}


def _values(tree: Any) -> Iterator[Any]:
    """Yield the leaves of a nest of objects."""
    for value in tree.values():
        if isinstance(value, Mapping):
            yield from _values(value)
        else:
            yield value


def _stages(user: Mapping[str, Any], facts: ModelFacts) -> Iterator[int]:
    """Yield the stages to try that hold at least one sample.  One rank has nothing to partition: stage 0."""
    given = _zero(user).get("stage", "all")
    wanted = STAGES if given == "all" else tuple(given) if isinstance(given, list) else (given,)
    for stage in wanted:
        if stage not in STAGES or isinstance(stage, bool):
            raise ValueError(f'zero_optimization.stage = {stage!r}: write 0, 1, 2, 3, a list of them, or "all"')
        known = facts.stages.get(stage)
        if known is None and facts.stages and given == "all":
            continue
        if known is None or known.largest_micro_batch:
            yield stage


def _sizes(user: Mapping[str, Any], keys: Autotuning, facts: ModelFacts, stage: int) -> Iterator[int]:
    """Yield the micro-batch sizes to try at a stage, the largest first; divisors of a train_batch_size."""
    given, known = user.get(_MICRO), facts.stages.get(stage)
    most = min(keys.max_train_micro_batch_size_per_gpu, known.largest_micro_batch if known else 1 << 30)
    share = _share(user, keys, facts)
    most = min(most, share) if share else most
    if isinstance(given, list):
        if not given or any(type(each) is not int or each < 1 for each in given):
            raise ValueError(f"{_MICRO} = {given!r}: a list of sizes has whole numbers >= 1")
        yield from sorted((each for each in given if each <= most), reverse=True)
        return
    least = keys.min_train_micro_batch_size_per_gpu
    if known is None:  # from a size that the user has, upwards
        start = given if type(given) is int else least
        ups = [start << power for power in range(_UNKNOWN_SIZES) if start << power <= most]
        yield from reversed(ups)
        return
    total = share if not keys.max_train_batch_size else 0
    size = most
    for _ in range(keys.num_tuning_micro_batch_sizes):
        while total and total % size:
            size -= 1
        if size < least:
            return
        yield size
        size = 1 << (size - 1).bit_length() - 1 if size > 1 else 0  # the next power of two below


def _share(user: Mapping[str, Any], keys: Autotuning, facts: ModelFacts) -> int:
    """Return the samples of one rank in a step; 0: what each candidate has."""
    total = user.get(_BATCH)
    if keys.max_train_batch_size or type(total) is not int:
        return keys.max_train_batch_size // facts.replicas
    if total % facts.replicas:
        raise ValueError(
            f"{_BATCH} = {total} does not divide over {facts.replicas} ranks that read data: write a multiple of "
            f'{facts.replicas}, or "max_train_batch_size" in the section autotuning for an upper limit'
        )
    return total // facts.replicas


def _accumulations(user: Mapping[str, Any], keys: Autotuning, facts: ModelFacts, size: int) -> Iterator[int]:
    """Yield the accumulation of a micro-batch size; none if it does not divide a batch that is given."""
    share = _share(user, keys, facts)
    if not share:
        given = user.get(_STEPS)
        yield given if type(given) is int else 1
    elif keys.max_train_batch_size or share % size == 0:
        yield share // size
