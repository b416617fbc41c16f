"""Count how often stage 3 gathers each unit in a micro-step, before anything runs.

A unit is gathered for the forward pass and, unless it can stay whole until then, again for the backward pass.  It may
stay while all whole units fit into `policy.max_live_numel` and at most `policy.max_reuse_numel` elements are used
before its next use.  So of a model slightly over the limit nearly everything stays, and only the rest is gathered
twice.  Prefetched units count as well.  These are the rules of unshard.py, applied to counts.

Modules are assumed to run once each, in definition order, and backward in reverse order of return: parameters that a
module holds itself beside child units are used at its end, as a head is.  A model that deviates (a weight read by
another module's code, a layer called twice) gathers more.  Embedding lookups need no weights in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs
from torch import nn

from zpartition.layout.policy import ZeroPolicy
from zpartition.layout.units import encloses

__all__ = ["count_gathers", "embedding_only_units"]

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def count_gathers(units: Mapping[str, int], policy: ZeroPolicy, once: Collection[str] = ()) -> Counter[str]:
    """Count gathers by unit in one micro-step, in the steady state.

    units: elements by name, in order of use.
    once: units that backward does not use.
    """
    events = list(_calls(units))
    backward = [name for name, is_entered in reversed(events) if not is_entered and name not in once]
    forward = _ForwardSimulation(units, policy, [*units, *backward])
    for name, is_entered in events:
        if is_entered:
            forward.enter(name)
        else:
            forward.leave(name)
    return forward.gathers + Counter(name for name in backward if name not in forward.whole)


def _calls(units: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield (unit, True) where its module is entered and (unit, False) where it is left; parents enclose children."""
    running: list[str] = []  # from outside inwards
    for name in units:
        while running and not encloses(running[-1], name):
            yield running.pop(), False
        yield name, True
        running.append(name)
    yield from ((name, False) for name in reversed(running))


def embedding_only_units(module: nn.Module, unit_of: Mapping[str, str]) -> frozenset[str]:
    """Return the units that hold only embedding weights; `unit_of`: unit by parameter name."""
    others = {
        id(param)
        for child in module.modules()
        if not isinstance(child, _LOOKUPS)
        for param in child.parameters(recurse=False)
    }
    found = dict.fromkeys(unit_of.values(), True)
    for name, param in module.named_parameters():
        if name in unit_of and id(param) in others:
            found[unit_of[name]] = False
    return frozenset(unit for unit, holds_lookups_alone in found.items() if holds_lookups_alone)


@attrs.define(eq=False)
class _ForwardSimulation:
    """Units that are whole during a forward pass."""

    units: Mapping[str, int]
    policy: ZeroPolicy
    order: list[str]  # of uses, backward included
    whole: set[str] = attrs.field(factory=set)
    gathers: Counter[str] = attrs.field(factory=Counter)
    live_numel: int = 0  # elements that are whole
    position: int = 0  # in the order, of the next use

    def enter(self, name: str) -> None:
        """Use a unit, and prefetch."""
        self._gather(name)
        self.position += 1
        ahead, room = 0, max(self.policy.max_live_numel, 2 * max(self.units.values()))
        for upcoming in self.order[self.position :]:
            ahead += self.units[upcoming]
            if ahead > self.policy.prefetch_numel:
                return
            if upcoming not in self.whole:
                if self.live_numel + self.units[upcoming] > room:
                    return
                self._gather(upcoming)

    def leave(self, name: str) -> None:
        """Reshard a unit, unless it may stay, after its module returned."""
        is_too_much = self.live_numel > self.policy.max_live_numel
        if is_too_much or self._distance(name) > self.policy.max_reuse_numel:
            self.whole.discard(name)
            self.live_numel -= self.units[name]

    def _gather(self, name: str) -> None:
        if name not in self.whole:
            self.whole.add(name)
            self.gathers[name] += 1
            self.live_numel += self.units[name]

    def _distance(self, name: str) -> int:
        upcoming = self.order[self.position :]
        until = upcoming.index(name) if name in upcoming else len(upcoming)
        return sum(self.units[each] for each in upcoming[:until])
