"""Float32 modules inside a narrower model: inputs are cast to float32, outputs back to the model's dtype.

torch does not multiply a float32 weight by a bf16 input.  So a pair of hooks around each fp32 module, the outermost
module whose parameters all stayed in float32, casts inputs and outputs.  Activation checkpointing runs modules again
during backward, so the hooks outlive a forward pass: they belong to an object that is closed.

Tensors that a model keeps wide by itself (the lists of Transformers) get no hooks: the model's code casts where it
has to, and sometimes uses the wide output.

Rejected: a subclass for each kept layer (changes the model's classes); casting inside the autograd functions of
single operations, which is what torch.autocast does.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import attrs
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zprecision.casting import cast
from zprecision.keep_in_fp32 import KeepInFp32

__all__ = ["Fp32Modules"]


@final
@attrs.define(eq=False)
class Fp32Modules:
    """Hooks around the fp32 modules of one model.  A context manager; `close` may be called twice."""

    names: tuple[str, ...]  # paths of the modules
    handles: list[RemovableHandle] = attrs.field(factory=list)

    @classmethod
    def install(cls, module: nn.Module, keep: KeepInFp32, outside: torch.dtype) -> Fp32Modules:
        """Install hooks around the modules that `keep` selects, in a model with weights in `outside`.

        Floating tensors among a module's arguments, at any depth of tuples, lists and dicts, become float32; those in
        its output become `outside`.

        Raises:
            ValueError: a pattern keeps some, but not all, of a torch layer's own parameters.
        """
        _check_whole_layers(module, keep)
        found = dict(_fp32_modules(module, keep.matching(module))) if keep.patterns else {}
        hooks = cls(tuple(found))

        def widen(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            return cast(args, torch.float32), cast(kwargs, torch.float32)

        def narrow(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            return cast(output, outside)

        for child in found.values():
            hooks.handles.append(child.register_forward_pre_hook(widen, with_kwargs=True))
            hooks.handles.append(child.register_forward_hook(narrow))
        return hooks

    def close(self) -> None:
        """Remove the hooks."""
        while self.handles:
            self.handles.pop().remove()

    def __enter__(self) -> Fp32Modules:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_whole_layers(module: nn.Module, keep: KeepInFp32) -> None:
    """Raise if a torch layer has parameters of two dtypes; other modules may mix them."""
    kept = keep.matching(module) if keep.patterns else frozenset()
    for path, child in module.named_modules():
        if not type(child).__module__.startswith("torch.nn."):
            continue
        own = [name for name, param in child.named_parameters(path, recurse=False) if param.is_floating_point()]
        wide = [name for name in own if name in kept]
        if wide and len(wide) < len(own):
            narrow = next(name for name in own if name not in kept)
            raise ValueError(
                f"{list(keep.patterns)} keeps {wide[0]} in float32 but not {narrow}, which the same "
                f"{type(child).__name__} uses with it: match the module ({path or 'the whole model'}), not one tensor"
            )


def _fp32_modules(module: nn.Module, kept: frozenset[str], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the outermost modules that have parameters, all of which are kept."""
    prefix = f"{path}." if path else ""
    names = [prefix + name for name, param in module.named_parameters() if param.is_floating_point()]
    if names and all(name in kept for name in names):
        yield path, module
        return
    for name, child in module.named_children():
        yield from _fp32_modules(child, kept, prefix + name)
