"""torch.compile of an engine's module, block by block.

The forward of each block is compiled, in place, so names, state dicts and the module's own hooks stay as they are:
hooks run around the compiled forward, not inside the graph.  Blocks are the members of the module's lists (the
layers of a transformer): equal ones are compiled once, and what is between them stays plain.  Rejected: compiling
the module as a whole by default, which takes minutes where a block takes seconds, for a few per cent; a list that
holds one block, or a module without lists, is compiled as a whole anyway.  A pipeline's blocks are its rank's layers.

Layers that are split over ranks speak to other ranks, which no graph can hold: those run as they are, with nothing
compiled inside of them, and graphs end before them and begin anew behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from zengine.engine.feature import Feature
from zengine.engine.stages import is_staged

if TYPE_CHECKING:
    from zengine.engine.parts import Run


def check(run: Run, unsupported: Mapping[str, bool], *, is_compiled: bool) -> None:
    """Raise ValueError if the module cannot be compiled; see `DeepSpeedEngine.compile`.

    unsupported: arguments of DeepSpeed's compiler, and if they are given.
    """
    if asked := [name for name, is_given in unsupported.items() if is_given]:
        raise ValueError(
            f"compile({asked[0]}=...) belongs to DeepCompile, which is not offered: leave it out; backward is "
            "compiled by the backend, and gathering is scheduled by the partition"
        )
    if is_staged(run.module) and run.plan.pipeline.schedule == "zero_bubble":
        raise ValueError(
            'compile() with the schedule "zero_bubble": a compiled layer has one backward, which this schedule '
            'takes in two halves. Use "1f1b", or leave compile() out'
        )
    if is_compiled:
        raise ValueError("compile() was called before: the module is compiled already")


@final
class Compiled(Feature):
    """Blocks with a compiled forward of their own, and split layers kept out of it; `close` gives all theirs back."""

    def __init__(self, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.backend = backend
        self.options = options
        self.blocks: list[nn.Module] = []
        self.own: list[dict[str, Any]] = []  # of each block: {"forward": ...} where its instance has one

    def attach(self, run: Run) -> None:
        """Compile."""
        blocks = blocks_of(run.module)
        talking = [module for module in run.module.modules() if talks(module)]
        self.blocks = [*talking, *(block for block in blocks if not talks(block))]
        self.own = [{"forward": vars(block)["forward"]} if "forward" in vars(block) else {} for block in self.blocks]
        for module in talking:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        for block in self.blocks[len(talking) :]:
            block.forward = torch.compile(block.forward, backend=self.backend, **self.options)

    def close(self) -> None:
        """Every block has its own forward again."""
        for block, own in zip(self.blocks, self.own):
            del vars(block)["forward"]
            vars(block).update(own)
        self.blocks, self.own = [], []


def talks(module: nn.Module) -> bool:
    """Return whether the module's own forward sends messages."""
    home = type(module).forward.__module__ or ""
    return home.startswith(_TALKING) and not home.endswith(".testing")


_TALKING = ("zpartition.tensor.", "zpartition.experts.", "zpartition.sequence.")


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of `module` with at least two; the module itself if there are none.

    Of a pipeline the layers that this rank owns.
    """
    if is_staged(module):
        return module.own_layers()
    found: list[nn.Module] = []
    _collect(module, found)
    return found or [module]


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            found += [member for member in child if member not in found]
        else:
            _collect(child, found)
