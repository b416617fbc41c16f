"""torch.compile of an engine's module, block by block.

The forward of each block is compiled in place, so names, state dicts and the module's hooks stay unchanged: hooks run
around the compiled forward, not inside the graph.  Blocks are the members of the module's lists (the layers of a
transformer).  Equal blocks are compiled once, and code between blocks is not compiled.  A list with one block, or a
module without lists, is compiled as a whole.  The blocks of a pipeline are the layers of this rank.

Layers that are split over ranks communicate, which a graph cannot contain: they run uncompiled, and graphs break
around them.  What decides that a layer is skipped (layer drop) is not compiled either, only the layer.

Rejected: compiling the whole module by default, which takes minutes instead of seconds, for a few per cent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from zengine.engine.feature import Feature
from zengine.features.layer_drop import SkippedLayer
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zengine.engine.parts import Run


def check(run: Run, unsupported: Mapping[str, bool], *, is_compiled: bool) -> None:
    """Raise ValueError if the module cannot be compiled; see `DeepSpeedEngine.compile`.

    unsupported: arguments of DeepSpeed's compiler, with True for those that are given.
    """
    if given := [name for name, is_given in unsupported.items() if is_given]:
        raise ValueError(
            f"compile({given[0]}=...) belongs to DeepCompile, which is not supported: leave it out; the backend "
            "compiles backward, and the partition schedules gathers"
        )
    if is_pipeline(run.module) and run.plan.pipeline.schedule == "zero_bubble":
        raise ValueError(
            'compile() with the schedule "zero_bubble": a compiled layer has one backward, and this schedule splits '
            'backward in two. Use "1f1b", or leave compile() out'
        )
    if is_compiled or (is_pipeline(run.module) and run.module.is_compiled):
        raise ValueError("compile() was called before: the module is compiled already")


@final
class Compiled(Feature):
    """Compiles the forward of each block, except in split layers; `close` restores the original forwards."""

    def __init__(self, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.backend = backend
        self.options = options
        self.blocks: list[nn.Module | SkippedLayer] = []
        self.own: list[dict[str, Any]] = []  # of each block: {"forward": ...} if its instance has one

    def attach(self, run: Run) -> None:
        """Replace the forwards."""
        blocks = blocks_of(run.module)
        split = [module for module in run.module.modules() if communicates(module)]
        self.blocks = [*split, *(_compiled_part(block) for block in blocks if not communicates(block))]
        self.own = [{"forward": vars(block)["forward"]} if "forward" in vars(block) else {} for block in self.blocks]
        for module in split:
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[no-untyped-call]
        for block in self.blocks[len(split) :]:
            block.forward = torch.compile(block.forward, backend=self.backend, **self.options)

    def close(self) -> None:
        """Restore every block's own forward."""
        for block, own in zip(self.blocks, self.own):
            del vars(block)["forward"]
            vars(block).update(own)
        self.blocks, self.own = [], []


def _compiled_part(block: nn.Module) -> nn.Module | SkippedLayer:
    """Return what has the forward to compile: not the choice whether the block runs."""
    owner = getattr(block.forward, "__self__", block)
    return owner if isinstance(owner, SkippedLayer) else block


_COMMUNICATING = ("zpartition.tensor.", "zpartition.experts.", "zpartition.sequence.")


def communicates(module: nn.Module) -> bool:
    """Return True if the module's own forward communicates with other ranks."""
    home = type(module).forward.__module__ or ""
    return home.startswith(_COMMUNICATING) and not home.endswith(".testing")


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists with at least two members; `[module]` if there are none.

    For a pipeline these are the layers that this rank owns.
    """
    if is_pipeline(module):
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
