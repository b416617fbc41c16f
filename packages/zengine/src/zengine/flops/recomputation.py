"""Recomputation probe: the share of a forward pass that backward computes again, by observation.

Activation checkpointing has many entry points (torch's function, a model's flag, a wrapper of a block), but all run
modules during backward.  So for one step hooks on the modules of the model's layers record runs under autograd.  The
share of the layers that runs again, by matrix elements (one multiply-add each per token), is the formula's
coefficient above 3: 4 if every layer is checkpointed, 3.5 for half of them.

Only *layers*, members of module lists, are probed.  An embedding is a lookup without FLOPs, and neither it nor the
head is ever checkpointed, so a large vocabulary or a tied weight cannot hide checkpointing.
Rejected: a threshold on the share of all parameters, which failed on these.

The hooks are removed afterwards.  Compiled modules are not probed: hooks would trigger a second compilation.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Iterator
from typing import Any, final

import attrs
from torch import nn
from torch.utils.hooks import RemovableHandle

from zengine._compat import backward_number

_LOOKUPS = (nn.Embedding, nn.EmbeddingBag)


class ObserverPhase(enum.Enum):
    """Progress of a probe, which observes one step."""

    WAITING = "waiting"  # before the first forward
    OBSERVING = "observing"  # hooks record the modules that run
    DONE = "done"  # the share is known; no hooks


@final
@attrs.define(eq=False)
class Probe:
    """Observes one step, for any number of backwards.  Without modules it does nothing.

    Invariant: hooks are installed exactly while it observes.
    """

    modules: tuple[nn.Module, ...] = ()  # those of the layers that have matrices of their own
    phase: ObserverPhase = ObserverPhase.WAITING
    again: set[nn.Module] = attrs.field(factory=set)  # those that ran in backward
    hooks: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Probe:
        """Return the probe of a module; an empty one if a part of it is compiled."""
        if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in module.modules()):
            return cls()
        within = (each for layer in layers_of(module) for each in layer.modules())
        return cls(tuple(dict.fromkeys(each for each in within if _matrix_numel(each))))

    def forward_begin(self) -> None:
        """Install the hooks at the first training forward."""
        if self.phase is ObserverPhase.WAITING and self.modules:
            self.hooks = [each.register_forward_pre_hook(self._record_run) for each in self.modules]
            self.phase = ObserverPhase.OBSERVING

    def finish(self) -> tuple[float, ...]:
        """End the step; return the recomputed share once it is known, else ()."""
        if self.phase is not ObserverPhase.OBSERVING:
            return ()
        self.close()
        total, self.modules = sum(map(_matrix_numel, self.modules)), ()
        return (sum(map(_matrix_numel, self.again)) / total,)

    def _record_run(self, module: nn.Module, _args: Any) -> None:
        if backward_number():
            self.again.add(module)

    def close(self) -> None:
        """Remove the hooks."""
        while self.hooks:
            self.hooks.pop().remove()
        self.phase = ObserverPhase.DONE


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the members of the model's module lists, else of its sequences of equal classes, else the model.

    Of nested lists the outermost count.
    """
    members = list(_outermost(model, nn.ModuleList)) or list(_outermost(model, nn.Sequential))
    return members if any(_matrix_numel(each) for member in members for each in member.modules()) else [model]


def _outermost(model: nn.Module, kind: type[nn.ModuleList] | type[nn.Sequential]) -> Iterator[nn.Module]:
    if isinstance(model, kind):
        yield from model.children() if kind is nn.ModuleList else _alike(model.children())
        return
    for child in model.children():
        yield from _outermost(child, kind)


def _alike(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that have a sibling of their class."""
    given = list(modules)
    counts = collections.Counter(map(type, given))
    return [each for each in given if counts[type(each)] > 1]


def _matrix_numel(module: nn.Module) -> int:
    """Return the number of elements in a module's own matrices."""
    if isinstance(module, _LOOKUPS):
        return 0
    return sum(param.numel() for param in module.parameters(recurse=False) if param.dim() > 1)
