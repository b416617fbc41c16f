"""Checkpoint blocks wherever they are called, chosen by name; the model's code stays as it is.

The class of a block is replaced by a subclass whose `__call__` goes through a `Checkpointing`.  It wraps the call and
not `forward`, so that hooks of the block (those that gather its weights, say) run again with it.  Names, parameters
and state dicts do not change, `close` restores the classes, and pickles and copies are plain modules.

Rejected: wrapper modules, which put a component into every name; a `forward` set on each instance, which hooks and
compiled calls bypass in the recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import attrs
from torch import nn

from zpartition.activations.checkpointing import Checkpointing
from zpartition.layout.units import matches

__all__ = ["CheckpointedBlocks"]


@final
@attrs.define(eq=False)
class CheckpointedBlocks:
    """Modules of one model that are checkpointed until `close`."""

    modules: dict[str, nn.Module]  # by name
    original_classes: dict[nn.Module, type[nn.Module]]

    @classmethod
    def of(
        cls, model: nn.Module, patterns: Sequence[str], run: Checkpointing, *, elsewhere: Sequence[str] = ()
    ) -> CheckpointedBlocks:
        """Checkpoint the modules of `model` that match a pattern; of nested ones the outermost.

        elsewhere: names of modules on other ranks, as in another stage of a pipeline.

        Raises:
            ValueError: a pattern matches no module, here or elsewhere.
        """
        names = [name for name, _ in model.named_modules() if name]
        for pattern in patterns:
            if not any(matches(pattern, name) for name in (*names, *elsewhere)):
                shown = ", ".join([name for name in names if name.count(".") < 2][:10])
                raise ValueError(
                    f"pattern {pattern!r} of activation checkpoints matches none of the model's {len(names)} modules "
                    f"({shown}, ...): `*` is one component of a name, `**` any number"
                )
        chosen: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            inside = any(name.startswith(f"{outer}.") for outer in chosen)
            if name and not inside and any(matches(pattern, name) for pattern in patterns):
                chosen[name] = module
        blocks = cls(chosen, {module: type(module) for module in chosen.values()})
        for module, kind in blocks.original_classes.items():
            module.__class__ = _checkpointed(kind, run)
        return blocks

    def close(self) -> None:
        """Restore the classes; idempotent."""
        for module, kind in self.original_classes.items():
            module.__class__ = kind
        self.modules, self.original_classes = {}, {}


def _checkpointed(kind: type[nn.Module], run: Checkpointing) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(kind.__call__, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """Pickle and copy as a block of the original class."""
        given: Any = kind.__reduce_ex__(self, protocol)
        make, arguments, *rest = given
        if make.__name__ == "__newobj__":  # which can only create the object's own class
            make = object.__new__
        return (make, tuple(kind if each is type(self) else each for each in arguments), *rest)

    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**copied, "__call__": call, "__reduce_ex__": reduce})
