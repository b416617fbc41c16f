"""One number on the message of each boundary tells whether ranks still agree.

Problem.  `agreement` compares what ranks were given, once.  Later a schedule that rank 0 alone steps, a
ReduceLROnPlateau that sees each rank's own loss, or a `requires_grad_` under `if rank == 0` makes ranks update the
same weights in different ways.  Nothing fails: parts of one tensor have different learning rates, or copies drift.

Design.  Each rank reduces what must be alike to a digest of 18 bits, and adds coefficient * digest to the all-reduce
of the gradient statistics.  The coefficients of ranks that must agree add up to 0.  So the sum over all ranks is 0 if
digests are equal, and otherwise is not, except once in 2^18 times; digests depend on the step, so the next step finds
those.  All terms are whole numbers, and their sums stay below 2^53 for up to 2^14 ranks: float64 is exact, in any
order, on any backend.  All ranks see the same sum, so all raise or none, and before the update: no weight moves.

Several groups share the number: options are compared among all ranks of a pipeline stage (other stages have other
parameters, and may have other rates), batches among tensor ranks (other replicas have other data).

If the sum is not 0, ranks exchange what they have, in words, and those decide.  So a difference of digests alone (a
parameter that was frozen in the middle of a step) costs a message, and stops no run.

Rejected: comparing n * sum(x^2) with sum(x)^2, which tests one group, whose verdict others would have to be told;
minimum and maximum (a second message); a hash of the weights (a pass over memory).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, final

import attrs
import torch
from torch import Tensor

from zengine.engine.digest import code, fingerprint, is_fixed, mixed, plain

if TYPE_CHECKING:
    from zcomm import Groups
    from zpartition import Partition

__all__ = ["Drift", "Options", "RanksDisagree", "Topic", "Trained", "coefficient", "make_drift"]

BITS = 18
_MASK = 2**BITS - 1
_KIN = (
    "replicate",
    "shard",
    "sequence",
    "tensor",
)  # axes along which ranks hold the same parameters, or parts of them
_OF_RANKS = (
    "params",
    "param_names",
    "initial_lr",
)  # keys of a group that no update reads, or that ranks may differ in

Facts = dict[str, tuple[Any, str]]  # by what it is about: a JSON value to compare, and how it reads


class RanksDisagree(ValueError):
    """Ranks were given different configs, models, data or versions, or changed an option on some ranks alone."""


class Topic(Protocol):
    """Something that ranks must have alike when a boundary begins."""

    cure: str  # what to do where they do not

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that must agree with this one, itself among them; of the world."""

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """A number, or () int64 on the device, of which the low bits count.

        any_unused: some parameter got no gradient on this rank.
        """

    def facts(self) -> Facts:
        """Return what the digest is of, in words; may wait for the device."""


@final
@attrs.define(eq=False)
class Drift:
    """What ranks are compared in at each boundary.  A rank that has nobody to agree with has no topics."""

    groups: Groups
    device: torch.device
    exchange: Callable[[Any], list[Any]]  # a value of each rank of `groups`, to all
    topics: list[tuple[Topic, int]] = attrs.field(factory=list)  # with this rank's coefficients

    def add(self, topic: Topic) -> None:
        """Compare `topic`, too; on all ranks alike."""
        if len(topic.ranks) > 1:
            self.topics.append((topic, coefficient(topic.ranks, self.groups.rank)))

    def number(self, step: int, *, any_unused: bool) -> float | Tensor:
        """This rank's term of a sum over all ranks that is 0 where they agree; a () tensor if it is on the device."""
        total: float | Tensor = 0.0
        for topic, factor in self.topics:
            digest = topic.digest(any_unused=any_unused)
            if isinstance(digest, Tensor):
                total = total + ((digest & _MASK) * factor).to(self.device, torch.float64)
            else:
                total = total + (mixed(digest, step) & _MASK) * factor
        return total

    def check(self, total: float) -> None:
        """Compare in words if the sum says so; a collective of all ranks then.

        Raises:
            RanksDisagree: on every rank; names what differs, the values and the ranks.
        """
        if total == 0:
            return
        mine = [[topic.ranks, topic.facts()] for topic, _ in self.topics]
        everyone = self.exchange(mine)
        numbers = sorted(self.groups.table.reshape(-1).tolist())
        for index, (topic, _) in enumerate(self.topics):
            found = {rank: theirs[index] for rank, theirs in zip(numbers, everyone)}
            for kin in {tuple(ranks): None for ranks, _ in found.values()}:
                if differences := list(_differences({rank: found[rank][1] for rank in kin})):
                    more = f" ({len(differences)} differences in all)" * (len(differences) > 1)
                    raise RanksDisagree(f"{differences[0]}{more}. {topic.cure} {_DROPPED}")


def make_drift(
    partition: Partition,
    optimizer: torch.optim.Optimizer | None,
    groups: Groups,
    exchange: Callable[[Any], list[Any]],
) -> Drift:
    """Compares options and what is trained."""
    drift, kin = Drift(groups, partition.device, exchange), groups.ranks(*_KIN)
    drift.add(Options(kin, lambda: [] if optimizer is None else optimizer.param_groups))
    drift.add(Trained(kin, partition))
    return drift


def coefficient(ranks: Sequence[int], rank: int) -> int:
    """This rank's; those of `ranks` add up to 0, and none is 0 where there are several."""
    after = ranks[(ranks.index(rank) + 1) % len(ranks)]
    return _scattered(rank) - _scattered(after)


@final
@attrs.define(eq=False)
class Options:
    """The optimizer's options, of each parameter group."""

    ranks: tuple[int, ...]
    groups: Callable[[], list[dict[str, Any]]]
    seen: list[dict[str, tuple[object, int | Tensor]]] = attrs.field(factory=list)  # by group and key: value and code

    cure = (
        "Set it alike on every rank. A schedule that one rank alone steps does this, and so does a ReduceLROnPlateau "
        "that sees each rank's own loss: give it the loss of the step's report, the mean over ranks."
    )

    def digest(self, *, any_unused: bool) -> int | Tensor:
        """A sum over all values, so the order of keys has no say; what is the same object as before is not read."""
        groups = self.groups()
        self.seen += [{} for _ in groups[len(self.seen) :]]
        total: int | Tensor = 0
        for index, (group, seen) in enumerate(zip(groups, self.seen)):
            for key, value in group.items():
                last = seen.get(key)
                if last is None or last[0] is not value:
                    last = _coded(f"{index} {key}", value) if key not in _OF_RANKS else (value, 0)
                    seen[key] = last
                total = total + last[1]
        return total

    def facts(self) -> Facts:
        """Each option of each group."""
        return {
            f"param_groups[{index}][{key!r}]": (plain(value, waits=True), _shown(value))
            for index, group in enumerate(self.groups())
            for key, value in group.items()
            if key not in _OF_RANKS
        }


@final
@attrs.define(eq=False)
class Trained:
    """Which parameters are trained."""

    ranks: tuple[int, ...]
    partition: Partition
    names: tuple[str, ...] = ()  # of all that were, when they were last looked at
    code: int = 0  # of those

    cure = "Set requires_grad alike on every rank, before the forward pass."

    def digest(self, *, any_unused: bool) -> int:
        """Looks at parameters only if some gradient is missing: one that is frozen has none."""
        params = self.partition.params
        if any_unused:
            return self._code(tuple(name for name, param in params.items() if param.requires_grad))
        if len(self.names) == len(params):  # parameters are never taken away
            return self.code
        return self._code(tuple(params))

    def facts(self) -> Facts:
        """Trained or frozen, of each parameter."""
        trained = {name: param.requires_grad for name, param in self.partition.params.items()}
        frozen = dict.fromkeys(self.partition.frozen_params, False)
        return {name: (on, "trained" if on else "frozen") for name, on in {**frozen, **trained}.items()}

    def _code(self, names: tuple[str, ...]) -> int:
        if names != self.names:
            self.names, self.code = names, code("trained", names)
        return self.code


def _coded(name: str, value: Any) -> tuple[object, int | Tensor]:
    """The value, if it cannot change by itself, and its code."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        return _CHANGES, fingerprint(value, name)
    return value if is_fixed(value) else _CHANGES, code(name, value)


def _differences(facts: Mapping[int, Mapping[str, Sequence[Any]]]) -> Iterable[str]:
    """Return what is not the same on all ranks, in words."""
    for what in dict.fromkeys(what for mine in facts.values() for what in mine):
        readings: dict[str, tuple[str, list[int]]] = {}
        for rank, mine in facts.items():
            value, shown = mine.get(what, ("missing", "missing"))
            readings.setdefault(repr(value), (shown, []))[1].append(rank)
        if len(readings) > 1:
            yield f"{what} is " + " and ".join(f"{shown} on {_named(ranks)}" for shown, ranks in readings.values())


def _named(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + ", ..." * (len(ranks) > 8)
    return f"rank{'s' * (len(ranks) > 1)} {shown}"


def _shown(value: Any) -> str:
    return str(value.tolist()) if isinstance(value, Tensor) else repr(value)


def _scattered(rank: int) -> int:
    """`BITS` bits, others for each rank: odd factors and shifts lose none."""
    bits: int = (rank + 1) * 0x2545F & _MASK
    bits = (bits ^ (bits >> 9)) * 0x1B873 & _MASK
    return bits ^ (bits >> 7)


_CHANGES = object()  # in place of a value that may become another in place: it is read each time
_DROPPED = "The gradients of this step were dropped, and no weight has moved."
