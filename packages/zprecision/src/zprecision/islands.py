"""Modules of float32 inside a narrower model: their inputs are widened, and what they return is narrowed again.

torch multiplies no float32 weight by a bf16 input.  So around each island, the outermost module all of whose
parameters stayed in float32, a hook casts what goes in and another one what comes out.  They have to be there during
backward as well, since activation checkpointing runs modules again then; so they are no business of one forward
pass, but belong to an object that is closed.

What a model keeps wide by itself (the lists of Transformers) gets no hooks: its code casts where it has to, and
sometimes wants the wide output.

Rejected: a subclass for each kept layer (a model would not be what it was built as); casting inside the
autograd functions of single operations, which is what torch.autocast does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zprecision.casting import cast
from zprecision.keeping import Keep

__all__ = ["Islands"]


@final
@attrs.define(eq=False)
class Islands:
    """The hooks around the islands of one model.  A context manager; `close` may be called twice."""

    names: tuple[str, ...]  # paths of the modules
    handles: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def install(cls, module: nn.Module, keep: Keep, outside: torch.dtype) -> Islands:
        """Hook the islands that the patterns of `keep` make in `module`, whose other weights are `outside`.

        Floating tensors among a module's arguments, at any depth of tuples, lists and dicts, become float32, those in
        its output `outside`.

        Raises:
            ValueError: a pattern keeps some of a torch layer's own parameters and not the others.
        """
        _refuse_halves(module, keep)
        found = dict(_islands(module, keep.asked(module))) if keep.patterns else {}
        islands = cls(tuple(found))

        def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return cast(args, torch.float32), cast(kwargs, torch.float32)

        def narrow(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return cast(output, outside)

        for island in found.values():
            islands.handles.append(island.register_forward_pre_hook(widen, with_kwargs=True))
            islands.handles.append(island.register_forward_hook(narrow))
        return islands

    def close(self) -> None:
        """Remove the hooks."""
        while self.handles:
            self.handles.pop().remove()

    def __enter__(self) -> Islands:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _refuse_halves(module: nn.Module, keep: Keep) -> None:
    """torch's layers want one dtype; what a model's own modules do with two is theirs to know."""
    kept = keep.asked(module) if keep.patterns else frozenset()
    for path, child in module.named_modules():
        if not type(child).__module__.startswith("torch.nn."):
            continue
        own = [name for name, param in child.named_parameters(path, recurse=False) if param.is_floating_point()]
        wide = [name for name in own if name in kept]
        if wide and len(wide) < len(own):
            narrow = next(name for name in own if name not in kept)
            raise ValueError(
                f"{list(keep.patterns)} keeps {wide[0]} in float32 and not {narrow}, which the same "
                f"{type(child).__name__} uses with it: name the module ({path or 'all of it'}), not one tensor"
            )


def _islands(module: nn.Module, kept: frozenset[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the outermost modules with parameters, all of which are kept."""
    prefix = f"{path}." if path else ""
    names = [prefix + name for name, param in module.named_parameters() if param.is_floating_point()]
    if names and all(name in kept for name in names):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _islands(child, kept, prefix + name)
