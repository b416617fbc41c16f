"""How much of a forward pass the backward pass computes again: seen, not asked.

Activation checkpointing has many doors (torch's function, a model's flag, a wrapper of a block), but all of them run
modules during backward.  So for one step the modules of the model's layers tell when autograd runs them.  The share
of the layers that runs again, by the elements of their matrices (a multiply-add each, for each token), is what the
formula's coefficient has above 3: 4 where every layer is checkpointed, 3.5 for half of them.

What counts are the *layers*: members of lists of modules.  An embedding is a lookup without FLOPs, and nobody
checkpoints it or the head, so neither a large vocabulary nor a tied weight makes a checkpointed model look plain.
Rejected: a threshold on the share of all parameters, which did.

The hooks are gone afterwards.  A compiled module is not looked at: hooks would have it compiled twice.
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


class Stage(enum.Enum):
    """Where a probe is in its one step."""

    WAITING = "waiting"  # for the first forward
    LOOKING = "looking"  # at the modules that run
    OVER = "over"  # everything is known; no hooks


@final
@attrs.define(eq=False)
class Probe:
    """Watches one step, in whichever way its backwards are called.  Without modules it is the identity.

    Invariant: hooks are there exactly while it looks.
    """

    modules: tuple[nn.Module, ...] = ()  # those of the layers that have matrices of their own
    stage: Stage = Stage.WAITING
    again: set[nn.Module] = attrs.field(factory=set)  # those that ran in backward
    hooks: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Probe:
        """Of a module; of nothing if a part of it is compiled."""
        if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in module.modules()):
            return cls()
        within = (each for layer in layers_of(module) for each in layer.modules())
        return cls(tuple(dict.fromkeys(each for each in within if _matrix_numel(each))))

    def forward_begin(self) -> None:
        """A training forward is about to run."""
        if self.stage is Stage.WAITING and self.modules:
            self.hooks = [each.register_forward_pre_hook(self._runs) for each in self.modules]
            self.stage = Stage.LOOKING

    def finish(self) -> tuple[float, ...]:
        """The step ends; the share that was computed again, once, when it is known, and nothing otherwise."""
        if self.stage is not Stage.LOOKING:
            return ()
        self.close()
        total, self.modules = sum(map(_matrix_numel, self.modules)), ()
        return (sum(map(_matrix_numel, self.again)) / total,)

    def _runs(self, module: nn.Module, _args: Any) -> None:
        if backward_number():
            self.again.add(module)

    def close(self) -> None:
        """Look no more."""
        while self.hooks:
            self.hooks.pop().remove()
        self.stage = Stage.OVER


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The members of the model's lists; without lists those members of its sequences that are alike; without them
    all of the model.  Of lists within lists the outermost count."""
    members = list(_outermost(model, nn.ModuleList)) or list(_outermost(model, nn.Sequential))
    return members if any(_matrix_numel(each) for member in members for each in member.modules()) else [model]


def _outermost(model: nn.Module, kind: type[nn.ModuleList] | type[nn.Sequential]) -> Iterator[nn.Module]:
    if isinstance(model, kind):
        yield from model.children() if kind is nn.ModuleList else _alike(model.children())
        return
    for child in model.children():
        yield from _outermost(child, kind)


def _alike(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that have a sibling of their class."""
    given = list(modules)
    counts = collections.Counter(map(type, given))
    return [each for each in given if counts[type(each)] > 1]


def _matrix_numel(module: nn.Module) -> int:
    """Elements that take part in matrix products, of parameters of its own."""
    if isinstance(module, _LOOKUPS):
        return 0
    return sum(param.numel() for param in module.parameters(recurse=False) if param.dim() > 1)
