"""Blocks that are checkpointed wherever they are called, chosen by their names: the model's code stays as it is.

A block's class is exchanged for one made of it, whose call goes through a `Checkpointing`.  It is the call and not
`forward`, so that hooks of the block (those which gather its weights, say) run again with it.  Names, parameters and
state dicts are untouched, `close` puts the classes back, and what is saved or copied is plain.

Rejected: wrapper modules, which put a component into every name; a `forward` of our own on each module, behind whose
back hooks and compiled calls would not run again.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, final

import attrs
from torch import nn

from zpartition.activations.checkpointing import Checkpointing
from zpartition.patterns import matches

__all__ = ["Blocks"]


@final
@attrs.define(eq=False)
class Blocks:
    """Modules of one model that are checkpointed, until `close`."""

    modules: dict[str, nn.Module]  # by name
    plain: dict[nn.Module, type[nn.Module]]  # what their classes were

    @classmethod
    def of(
        cls, model: nn.Module, patterns: Sequence[str], run: Checkpointing, *, elsewhere: Sequence[str] = ()
    ) -> Blocks:
        """Checkpoint the modules of `model` that a pattern names; of nested ones the outermost.

        elsewhere: names of modules that other ranks have, as in one stage of a pipeline.

        Raises:
            ValueError: a pattern names nothing, elsewhere neither.
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
        for module, kind in blocks.plain.items():
            module.__class__ = _checkpointed(kind, run)
        return blocks

    def close(self) -> None:
        """Call them plainly again.  May be called again."""
        for module, kind in self.plain.items():
            module.__class__ = kind
        self.modules, self.plain = {}, {}


def _checkpointed(kind: type[nn.Module], run: Checkpointing) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return run(functools.partial(kind.__call__, self), *args, **kwargs)

    def reduce(self: nn.Module, protocol: Any) -> Any:
        """For pickle and copy: what is saved or copied is a block of the class that the model's code has."""
        given: Any = kind.__reduce_ex__(self, protocol)
        make, arguments, *rest = given
        if make.__name__ == "__newobj__":  # which may make nothing but the object's own class
            make = object.__new__
        return (make, tuple(kind if each is type(self) else each for each in arguments), *rest)

    copied = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {**copied, "__call__": call, "__reduce_ex__": reduce})
