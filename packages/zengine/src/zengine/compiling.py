"""torch.compile of an engine's module, block by block.

The forward of each block is compiled, in place, so names, state dicts and the module's own hooks stay as they are:
hooks run around the compiled forward, not inside the graph.  Blocks are the members of the module's lists (the
layers of a transformer): equal ones are compiled once, and what is between them stays plain.  Rejected: compiling
the module as a whole by default, which takes minutes where a block takes seconds, for a few per cent; a list that
holds one block, or a module without lists, is compiled as a whole anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from zengine.features import Feature

if TYPE_CHECKING:
    from zengine.engine import Engine
    from zengine.parts import Parts


class EngineCompiling:
    """`compile` and `is_compiled`; mixed into `Engine`."""

    if TYPE_CHECKING:
        module: nn.Module
        parts: Parts
        features: tuple[Feature, ...]
        add_feature: Callable[[Feature], None]

    def compile(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Any = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the module's blocks with torch.compile(backend=..., **compile_kwargs); undone by `close`.

        Raises:
            ValueError: a schedule or compiled autograd is asked for, which DeepSpeed's compiler has; layers are split
                over ranks; or the module is compiled already.
        """
        asked = ["schedule"] * (schedule is not None) + ["compiled_autograd_enabled"] * compiled_autograd_enabled
        if asked:
            raise ValueError(
                f"compile({asked[0]}=...) belongs to DeepCompile, which is not offered: leave it out; backward is "
                "compiled by the backend, and gathering is scheduled by the partition"
            )
        if self.parts.partition.cell.size > 1:
            raise ValueError(
                f"compile() is not available for layers that are split over ranks ({self.parts.partition.cell.size} "
                "here): torch.compile cannot look into their messages. Leave it out, or use one tensor rank."
            )
        if self.is_compiled:
            raise ValueError("compile() was called before: the module is compiled already")
        self.add_feature(Compiled(backend, compile_kwargs or {}))

    @property
    def is_compiled(self) -> bool:
        """Whether `compile` was called."""
        return any(isinstance(feature, Compiled) for feature in self.features)


@final
class Compiled(Feature):
    """Blocks with a compiled forward of their own; `close` gives them back the plain one."""

    def __init__(self, backend: str | Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.backend = backend
        self.options = options
        self.blocks: list[nn.Module] = []
        self.own: list[dict[str, Any]] = []  # of each block: {"forward": ...} where its instance has one

    def attach(self, engine: Engine) -> None:
        """Compile."""
        self.blocks = blocks_of(engine.module)
        self.own = [{"forward": vars(block)["forward"]} if "forward" in vars(block) else {} for block in self.blocks]
        for block in self.blocks:
            block.forward = torch.compile(block.forward, backend=self.backend, **self.options)

    def close(self) -> None:
        """Every block has its own forward again."""
        for block, own in zip(self.blocks, self.own):
            del vars(block)["forward"]
            vars(block).update(own)
        self.blocks, self.own = [], []


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The members of the outermost lists of `module` with at least two; the module itself if there are none."""
    found: list[nn.Module] = []
    _collect(module, found)
    return found or [module]


def _collect(module: nn.Module, found: list[nn.Module]) -> None:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) > 1:
            found += [member for member in child if member not in found]
        else:
            _collect(child, found)
