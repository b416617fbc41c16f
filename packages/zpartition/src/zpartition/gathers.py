"""How often stage 3 gathers each unit in a micro-step, before anything runs: the rules of residence.py, on counts.

A unit is gathered for the forward pass and, unless it may stay whole until then, again for the backward pass.  It may
stay while everything whole fits into `policy.max_live_numel` and no more than `policy.max_reuse_numel` elements are
used before it is used again; so of a model a little over the limit nearly all stays, and what is gathered twice is
the rest.  What was gathered ahead of its use takes room, too.

Modules are taken to run once each, in the order in which they were defined, and backward from the last that returns
to the first: what a module holds itself beside others that are units, it needs at its end, as a head.  A model that
goes another way (a weight that another module's code reads, a layer that is called again) gathers more.  A lookup in
an embedding needs no weights in backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping

import attrs
from torch import nn

from zpartition.policy import ZeroPolicy
from zpartition.units import encloses

__all__ = ["count_gathers", "lookups"]

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


def count_gathers(units: Mapping[str, int], policy: ZeroPolicy, once: Collection[str] = ()) -> Counter[str]:
    """Gathers of each unit in one micro-step of a step like the one before.

    units: elements by name, in the order of use; once: units that backward does not use.
    """
    events = list(_calls(units))
    backward = [name for name, is_entered in reversed(events) if not is_entered and name not in once]
    forward = _Forward(units, policy, [*units, *backward])
    for name, is_entered in events:
        if is_entered:
            forward.enter(name)
        else:
            forward.leave(name)
    return forward.gathers + Counter(name for name in backward if name not in forward.whole)


def _calls(units: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """(unit, whether its module is entered or left): modules that hold others run around them."""
    running: list[str] = []  # from outside inwards
    for name in units:
        while running and not encloses(running[-1], name):
            yield running.pop(), False
        yield name, True
        running.append(name)
    yield from ((name, False) for name in reversed(running))


def lookups(module: nn.Module, unit_of: Mapping[str, str]) -> frozenset[str]:
    """Units that hold nothing but weights of embeddings; `unit_of`: unit by name of parameter."""
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
class _Forward:
    """Which units are whole in a forward pass."""

    units: Mapping[str, int]
    policy: ZeroPolicy
    order: list[str]  # of uses, backward included
    whole: set[str] = attrs.field(factory=set)
    gathers: Counter[str] = attrs.field(factory=Counter)
    live_numel: int = 0  # elements that are whole
    position: int = 0  # in the order, of the next use

    def enter(self, name: str) -> None:
        """Use a unit, and gather ahead."""
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
        """Its module has returned."""
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
