"""Drift: one number in the all-reduce of each boundary shows whether ranks still agree.

Problem.  `agreement` compares what ranks were given, once.  Later a schedule that only rank 0 steps, a
ReduceLROnPlateau that sees each rank's own loss, or a `requires_grad_` under `if rank == 0` makes ranks update the
same weights differently.  Nothing fails: parts of one tensor have different learning rates, or replicas diverge.

Design.  Each rank reduces the values that must be equal to a digest of 18 bits, and adds coefficient * digest to the
all-reduce of the gradient statistics.  The coefficients of ranks that must agree sum to 0.  So the sum over all ranks
is 0 if digests are equal; if not, it is 0 only once in 2^18 times, and digests depend on the step, so the next step
detects the rest.  All terms are integers whose sums stay below 2^53 for up to 2^14 ranks: float64 is exact, in any
order, on any backend.  All ranks get the same sum, so all raise or none, before the update: no weight changes.

Several groups share the number: options are compared among all ranks of a pipeline stage (other stages have other
parameters, and may have other rates), batches among tensor ranks (other replicas have other data).

If the sum is not 0, ranks exchange the values as text, and these decide.  So a difference of digests alone (a
parameter that was frozen within a step) costs a message and stops no run.

Rejected: comparing n * sum(x^2) with sum(x)^2, which covers one group, whose result other groups would need a message
for; minimum and maximum (a second message); a hash of the weights (a pass over memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zengine.engine.digest import fingerprint, is_fixed, mix, to_plain, value_code
from zengine.pages import Page, explained

if TYPE_CHECKING:
    from zcomm import Groups
    from zpartition import Partition

__all__ = ["Drift", "Options", "RanksDisagree", "Topic", "Trained", "coefficient", "make_drift"]

BITS = 18
_MASK = 2**BITS - 1
_SAME_PARAMETERS = ("replicate", "shard", "sequence", "tensor")  # axes of ranks with the same parameters, or parts
_NOT_COMPARED = ("params", "param_names", "initial_lr")  # keys of a group that no update reads, or that may differ

_MUTABLE = object()  # in place of a value that may change in place: it is read each time
_DROPPED = "The gradients of this step were dropped, and no weight has moved."

Facts = dict[str, tuple[Any, str]]  # by name: a JSON value to compare, and its text


@explained(Page.RANKS_DISAGREE)
class RanksDisagree(ValueError):
    """Ranks have different configs, models, data or versions, or an option changed on some ranks only."""


class Topic(Protocol):
    """Values that must be equal on some ranks when a boundary begins."""

    hint: str  # remedy, for the error

    @property
    def ranks(self) -> tuple[int, ...]:
        """World ranks that must agree, this one included."""

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """Return a number, or () int64 on the device; its low bits count.

        any_unused: some parameter has no gradient on this rank.
        """

    def facts(self) -> Facts:
        """Return the values behind the digest; may wait for the device."""


@final
@attrs.define(eq=False)
class Drift:
    """Comparison of ranks at each boundary.  A rank that shares no values with others has no topics."""

    groups: Groups
    device: torch.device
    exchange: Callable[[Any], list[Any]]  # all-gathers a value of each of `groups.replica_ranks()`
    topics: list[tuple[Topic, int]] = attrs.field(factory=list)  # each with this rank's coefficient

    def add(self, topic: Topic) -> None:
        """Compare `topic` as well; all ranks call."""
        if len(topic.ranks) > 1:
            self.topics.append((topic, coefficient(topic.ranks, self.groups.rank)))

    def number(self, step: int, *, any_unused: bool) -> float | Tensor:
        """Return this rank's term of a sum over ranks that is 0 if they agree; a () tensor if it is on the device."""
        total: float | Tensor = 0.0
        for topic, factor in self.topics:
            digest = topic.digest(any_unused=any_unused)
            if isinstance(digest, Tensor):
                total = total + ((digest & _MASK) * factor).to(self.device, torch.float64)
            else:
                total = total + (mix(digest, step) & _MASK) * factor
        return total

    def check(self, total: float) -> None:
        """Compare the values if the sum is not 0; a collective of all ranks then.

        Raises:
            RanksDisagree: on every rank; names the first difference, its values and ranks.
        """
        if total == 0:
            return
        everyone = self.exchange([[topic.ranks, topic.facts()] for topic, _ in self.topics])
        numbers = self.groups.replica_ranks()
        for index, (topic, _) in enumerate(self.topics):
            found = {rank: topics[index] for rank, topics in zip(numbers, everyone)}
            for group in {tuple(ranks): None for ranks, _ in found.values()}:
                if differences := list(_differences({rank: found[rank][1] for rank in group})):
                    more = f" ({len(differences)} differences in all)" * (len(differences) > 1)
                    raise RanksDisagree(f"{differences[0]}{more}. {topic.hint} {_DROPPED}")


def make_drift(
    partition: Partition,
    optimizer: torch.optim.Optimizer | None,
    groups: Groups,
    exchange: Callable[[Any], list[Any]],
) -> Drift:
    """Return a comparison of the optimizer's options and of the trained parameters."""
    drift = Drift(groups, partition.device, exchange)
    ranks = groups.ranks(*(_SAME_PARAMETERS[1:] if groups.independent else _SAME_PARAMETERS))
    drift.add(Options(ranks, lambda: [] if optimizer is None else optimizer.param_groups))
    drift.add(Trained(ranks, partition))
    return drift


def coefficient(ranks: Sequence[int], rank: int) -> int:
    """Return the coefficient of `rank`; those of `ranks` sum to 0, and none is 0 if there are several."""
    after = ranks[(ranks.index(rank) + 1) % len(ranks)]
    return _spread(rank) - _spread(after)


@final
@attrs.define(eq=False)
class Options:
    """Topic: options of each parameter group of the optimizer."""

    ranks: tuple[int, ...]
    groups: Callable[[], list[dict[str, Any]]]
    seen: list[dict[str, tuple[object, int | Tensor]]] = attrs.field(factory=list)  # key -> (value, code)

    hint = (
        "Set it to the same value on every rank. A schedule that only one rank steps causes this, and so does a "
        "ReduceLROnPlateau that sees each rank's own loss: pass it the loss of the step's report, a mean over ranks."
    )

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """Sum the codes of all values, so that key order does not matter; immutable values are hashed once."""
        groups = self.groups()
        self.seen += [{} for _ in groups[len(self.seen) :]]
        total: int | Tensor = 0
        for index, (group, seen) in enumerate(zip(groups, self.seen)):
            for key, value in group.items():
                last = seen.get(key)
                if last is None or last[0] is not value:
                    last = _code_of(f"{index} {key}", value) if key not in _NOT_COMPARED else (value, 0)
                    seen[key] = last
                total = total + last[1]
        return total

    def facts(self) -> Facts:
        """Return each option of each group."""
        return {
            f"param_groups[{index}][{key!r}]": (to_plain(value, waits=True), _to_text(value))
            for index, group in enumerate(self.groups())
            for key, value in group.items()
            if key not in _NOT_COMPARED
        }


@final
@attrs.define(eq=False)
class Trained:
    """Topic: the set of trained parameters."""

    ranks: tuple[int, ...]
    partition: Partition
    names: tuple[str, ...] = ()  # of the trained parameters at the last check
    code: int = 0  # of those

    hint = "Set requires_grad to the same value on every rank, before the forward pass."

    def digest(self, *, any_unused: bool) -> int:
        """Return the code of the names; parameters are read only if a gradient is missing, as for frozen ones."""
        params = self.partition.params
        if any_unused:
            return self._code(tuple(name for name, param in params.items() if param.requires_grad))
        if len(self.names) == len(params):  # parameters are never removed
            return self.code
        return self._code(tuple(params))

    def facts(self) -> Facts:
        """Return for each parameter if it is trained or frozen."""
        trained = {name: param.requires_grad for name, param in self.partition.params.items()}
        frozen = dict.fromkeys(self.partition.frozen_params, False)
        return {name: (on, "trained" if on else "frozen") for name, on in {**frozen, **trained}.items()}

    def _code(self, names: tuple[str, ...]) -> int:
        if names != self.names:
            self.names, self.code = names, value_code("trained", names)
        return self.code


def _code_of(name: str, value: Any) -> tuple[object, int | Tensor]:
    """Return the value, or _MUTABLE, and its code."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return _MUTABLE, fingerprint(value, name)
    return value if is_fixed(value) else _MUTABLE, value_code(name, value)


def _differences(facts: Mapping[int, Mapping[str, Sequence[Any]]]) -> Iterable[str]:
    """Describe the values that are not equal on all ranks."""
    for name in dict.fromkeys(name for own in facts.values() for name in own):
        readings: dict[str, tuple[str, list[int]]] = {}
        for rank, own in facts.items():
            value, text = own.get(name, ("missing", "missing"))
            readings.setdefault(repr(value), (text, []))[1].append(rank)
        if len(readings) > 1:
            yield f"{name} is " + " and ".join(f"{text} on {_rank_list(ranks)}" for text, ranks in readings.values())


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _to_text(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def _spread(rank: int) -> int:
    """Return `BITS` bits, different for each rank: odd factors and shifts are invertible."""
    bits: int = (rank + 1) * 0x2545F & _MASK
    bits = (bits ^ (bits >> 9)) * 0x1B873 & _MASK
    return bits ^ (bits >> 7)
