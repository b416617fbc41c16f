"""Retention: a frozen policy, and a pure function that decides which checkpoints may be deleted.

A checkpoint is kept if any rule keeps it.  Three rules cannot be disabled: the checkpoint that `latest` names, the
newest complete one, and everything that is not a complete checkpoint.  (A damaged one is for a person to inspect, and
must not count as one of the last k: k damaged ones would push out the last good one.)

The metric of `best` is what the run saved as `objects={"metrics": {"loss": 2.31}}`.  `best` ignores a checkpoint
without it; the other rules still apply to it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, final

import attrs

from zckpt.errors import CheckpointInputError
from zckpt.format.canonical import JSON

METRICS = "metrics"  # key of a checkpoint's objects


@attrs.frozen
class Candidate:
    """A complete checkpoint, as a retention policy sees it."""

    tag: str
    step: int
    metrics: Mapping[str, float]


class RetentionPolicy(Protocol):
    """Rule that selects the checkpoints to keep."""

    def wants(self, found: Sequence[Candidate]) -> dict[str, str]:
        """Tags to keep -> the reason, as text.  `found`: complete checkpoints, highest step first."""
        ...


@final
@attrs.frozen
class KeepAll:
    """Policy that keeps all checkpoints."""

    def wants(self, found: Sequence[Candidate]) -> dict[str, str]:
        return {each.tag: "all are kept" for each in found}


KEEP_ALL = KeepAll()


def _at_least(low: int) -> Any:
    def check(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
        if type(value) is not int or value < low:
            raise CheckpointInputError(
                f"{type(instance).__name__}: {attribute.name} must be an int of at least {low}, given {value!r}"
            )

    return check


@final
@attrs.frozen
class Best:
    """Keep the `count` best checkpoints by one metric.

    Raises CheckpointInputError for an empty metric or an unknown mode.
    """

    metric: str  # name in objects["metrics"]
    mode: str = attrs.field(default="min")  # "min" | "max": whether low or high is better
    count: int = attrs.field(default=1, validator=_at_least(1))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise CheckpointInputError(f"Best: metric must be the name of a metric, given {self.metric!r}")
        if self.mode not in ("min", "max"):
            raise CheckpointInputError(f"Best: mode must be 'min' or 'max', given {self.mode!r}")

    @classmethod
    def parse(cls, text: str) -> Best:
        """ "loss", "loss:min" or "accuracy:max:3", as command lines and config files write it.

        Raises CheckpointInputError for another form.
        """
        metric, _, rest = text.partition(":")
        mode, _, count = rest.partition(":")
        if count and not count.isdecimal():
            raise CheckpointInputError(f"{text!r}: {count!r} is not a number; write METRIC[:min|max[:N]]")
        return cls(metric, mode or "min", int(count or 1))

    def of(self, found: Sequence[Candidate]) -> list[str]:
        """Tags of the best checkpoints; ties go to the newer."""
        sign, known = 1.0 if self.mode == "min" else -1.0, [each for each in found if self._knows(each)]
        scored = [(sign * each.metrics[self.metric], i, each.tag) for i, each in enumerate(known)]
        return [tag for _, _, tag in sorted(scored)[: self.count]]

    def _knows(self, candidate: Candidate) -> bool:
        return self.metric in candidate.metrics and not math.isnan(candidate.metrics[self.metric])


def _as_best(given: object) -> object:
    """Convert `best` of Retention: "loss", ("loss", "min"), ("loss", "min", 3), Best(...), or a list of them."""
    if isinstance(given, str):
        return (Best(given),)
    if isinstance(given, Best):
        return (given,)
    if isinstance(given, (tuple, list)):
        is_one = bool(given) and isinstance(given[0], str)
        return tuple(each if isinstance(each, Best) else Best(*each) for each in ([given] if is_one else given))
    raise CheckpointInputError(f"Retention: best must be (metric, 'min' or 'max') or Best(...), given {given!r}")


def _as_patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)


@final
@attrs.frozen(kw_only=True)
class Retention:
    """Keep the last few checkpoints, and others by rule.

    >>> Retention(last=3, every=1000, best=("loss", "min"), tags=("release-*",)).best
    (Best(metric='loss', mode='min', count=1),)
    """

    last: int = attrs.field(default=1, validator=_at_least(1))  # number of newest checkpoints, by step
    every: int = attrs.field(default=0, validator=_at_least(0))  # keep steps divisible by it; 0: no such rule
    best: tuple[Best, ...] = attrs.field(default=(), converter=_as_best)
    tags: tuple[str, ...] = attrs.field(default=(), converter=_as_patterns)  # shell patterns

    def wants(self, found: Sequence[Candidate]) -> dict[str, str]:
        reasons = {each.tag: f"one of the last {self.last}" for each in found[: self.last]}
        for each in found:
            if self.every and each.step % self.every == 0:
                reasons.setdefault(each.tag, f"step divisible by {self.every:,}")
            for pattern in self.tags:
                if fnmatch.fnmatchcase(each.tag, pattern):
                    reasons.setdefault(each.tag, f"tag matches {pattern!r}")
        for best in self.best:
            for tag in best.of(found):
                reasons.setdefault(tag, f"{best.mode} {best.metric}")
        return reasons


@final
@attrs.frozen
class KeepAlso:
    """A policy that also keeps one tag: a save with `keep` does not delete its own checkpoint."""

    keep: RetentionPolicy
    tag: str

    def wants(self, found: Sequence[Candidate]) -> dict[str, str]:
        return {self.tag: "saved just now", **self.keep.wants(found)}


@attrs.frozen
class RetentionDecision:
    """Decision about one checkpoint, and its reason."""

    candidate: Candidate
    reason: str  # why it is kept; "": it may be deleted

    @property
    def is_removed(self) -> bool:
        return not self.reason


def decide(keep: RetentionPolicy, found: Iterable[Candidate], pointed: Iterable[str]) -> list[RetentionDecision]:
    """Decide on each complete checkpoint, highest step first.  pointed: the tags that `latest` names."""
    order = sorted(found, key=lambda each: (each.step, each.tag), reverse=True)
    reasons = keep.wants(order)
    if order:
        reasons.setdefault(order[0].tag, "the newest complete one")
    for tag in pointed:
        reasons[tag] = "`latest` names it"
    return [RetentionDecision(each, reasons.get(each.tag, "")) for each in order]


def metrics_of(objects: Mapping[str, JSON]) -> dict[str, float]:
    """The numbers under objects["metrics"]; {} if there are none.  Skips an int too large for a float."""
    found: JSON = objects.get(METRICS)
    if not isinstance(found, dict):
        return {}
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if type(value) in (int, float):
            with contextlib.suppress(OverflowError):
                numbers[name] = float(value)
    return numbers
