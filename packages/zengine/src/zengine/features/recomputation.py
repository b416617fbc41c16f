"""Whether backward computes activations again: seen, not asked.

Activation checkpointing has many doors (torch's function, a model's flag, a wrapper of a block), but all of them run
modules during backward.  So for one micro-step each module with parameters of its own tells when it runs, and if
those that run in backward hold half of the parameters or more, the formula's coefficient is 4.  The hooks are gone
afterwards.  A compiled module is not looked at: hooks would have it compiled twice.
"""

from __future__ import annotations

import enum
from typing import Any, final

import attrs
from torch import nn
from torch.utils.hooks import RemovableHandle


class Stage(enum.Enum):
    """Where a probe is in its one micro-step."""

    WAITING = "waiting"  # for the first forward
    FORWARD = "forward"  # modules run as they should
    BACKWARD = "backward"  # modules that run now run again
    OVER = "over"  # everything is known; no hooks


@final
@attrs.define(eq=False)
class Probe:
    """Watches one micro-step.  Without modules it is the identity.

    Invariant: hooks are there exactly in FORWARD and BACKWARD.
    """

    modules: tuple[nn.Module, ...] = ()  # those with parameters of their own
    stage: Stage = Stage.WAITING
    again: dict[nn.Module, int] = attrs.field(factory=dict)  # ran in backward -> elements of its parameters
    hooks: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def of(cls, module: nn.Module) -> Probe:
        """Of a module; of nothing if a part of it is compiled."""
        if any(hasattr(each, "_orig_mod") or getattr(each, "_compiled_call_impl", None) for each in module.modules()):
            return cls()
        return cls(tuple(each for each in module.modules() if _own_numel(each)))

    def forward_begin(self) -> None:
        """A training forward is about to run."""
        if self.stage is Stage.BACKWARD:
            self.close()
        elif self.stage is Stage.WAITING and self.modules:
            self.hooks = [each.register_forward_pre_hook(self._runs) for each in self.modules]
            self.stage = Stage.FORWARD

    def backward_begin(self) -> None:
        if self.stage is Stage.FORWARD:
            self.stage = Stage.BACKWARD

    def finish(self) -> bool:
        """The step ends; True once at most: if it has turned out that activations are computed again."""
        if self.stage is Stage.BACKWARD:
            self.close()
        if self.stage is not Stage.OVER or not self.modules:
            return False
        total, self.modules = sum(map(_own_numel, self.modules)), ()
        return 2 * sum(self.again.values()) >= total

    def _runs(self, module: nn.Module, _args: Any) -> None:
        if self.stage is Stage.BACKWARD:
            self.again[module] = _own_numel(module)

    def close(self) -> None:
        """Look no more."""
        while self.hooks:
            self.hooks.pop().remove()
        self.stage = Stage.OVER


def _own_numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters(recurse=False))
