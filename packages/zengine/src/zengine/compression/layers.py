"""Compressed layers: a layer whose forward uses a rounded or pruned weight while its parameter stays as it is.

`compress` replaces the layer's forward by a bound method.  While the layer's own forward runs, its attributes
`weight` and `bias` are the effective ones: they lie in the instance's `__dict__`, which hides the parameters that a
module holds elsewhere.  So names of parameters, ZeRO's hooks, optimizers and checkpoints see the layer unchanged, and
every kind of layer that reads `self.weight` works, subclasses included.

The effective weight is a tensor of its own, which autograd saves until backward, at ZeRO stage 3 too.

A layer that no technique changes any more has its own forward back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import attrs
from torch import Tensor, nn

from zengine.compression.techniques import Technique

__all__ = ["CompressedLayer", "StepCount", "compress", "compressed_layers", "layer_of"]


@final
@attrs.define(eq=False)
class StepCount:
    """Steps that decide which techniques are on, shared by the layers of a model."""

    steps: int = -1  # applied steps; -1: no engine has begun, and nothing is on


@final
class CompressedLayer:
    """Forward of one layer under some techniques."""

    def __init__(self, layer: nn.Module, count: StepCount) -> None:
        self.layer = layer
        self.count = count
        self.techniques: list[Technique] = []  # in the order in which they act
        self._own = vars(layer).get("forward")  # a forward that was put on the instance before
        layer.forward = self.forward

    def add(self, technique: Technique) -> None:
        """Add a technique that acts after the others."""
        technique.prepare(self.layer)
        self.techniques.append(technique)

    def find(self, name: str) -> Technique | None:
        """Return the technique of that section."""
        return next((each for each in self.techniques if each.name == name), None)

    def replace(self, old: Technique, *new: Technique) -> None:
        """Put other techniques in the place of one, whose parameters and buffers stay."""
        at = self.techniques.index(old)
        self.techniques[at : at + 1] = new
        if not self.techniques:
            self._restore()

    def remove(self, technique: Technique) -> None:
        """Remove a technique with its parameters and buffers."""
        technique.release(self.layer)
        self.replace(technique)

    def active(self) -> list[Technique]:
        """Return the techniques that are switched on."""
        steps = self.count.steps
        return [each for each in self.techniques if each.offset <= steps]

    def effective(self) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias as forward uses them now."""
        return self._effective(self.active())

    def _effective(self, techniques: list[Technique]) -> tuple[Tensor, Tensor | None]:
        layer = self.layer
        weight: Tensor = layer.weight  # type: ignore[assignment]
        bias: Tensor | None = getattr(layer, "bias", None)
        for technique in techniques:
            weight = technique.weight(layer, weight)
            bias = None if bias is None else technique.bias(layer, bias)
        return weight, bias

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the layer with its effective weight, bias and input."""
        techniques = self.active()
        for technique in techniques:
            x = technique.input(self.layer, x)
        weight, bias = self._effective(techniques)
        own: Any = self._own
        with _shadowed(self.layer, weight=weight, bias=bias):
            return (
                type(self.layer).forward(self.layer, x, *args, **kwargs) if own is None else own(x, *args, **kwargs)
            )

    def _restore(self) -> None:
        if self._own is None:
            del self.layer.forward
        else:
            self.layer.forward = self._own


@contextmanager
def _shadowed(layer: nn.Module, **tensors: Tensor | None) -> Iterator[None]:
    """Hide parameters of `layer` by other tensors."""
    hidden = {name: tensor for name, tensor in tensors.items() if tensor is not layer._parameters.get(name)}
    vars(layer).update(hidden)
    try:
        yield
    finally:
        for name in hidden:
            vars(layer).pop(name, None)


def layer_of(module: nn.Module) -> CompressedLayer | None:
    """Return the compressed forward of a module; None for others."""
    owner = getattr(vars(module).get("forward"), "__self__", None)
    return owner if isinstance(owner, CompressedLayer) else None


def compressed_layers(model: nn.Module) -> dict[str, CompressedLayer]:
    """Return the compressed layers of a model by the names of their modules."""
    found = {name: layer_of(module) for name, module in model.named_modules()}
    return {name: layer for name, layer in found.items() if layer is not None}


def compress(module: nn.Module, count: StepCount) -> CompressedLayer:
    """Return the compressed forward of a module, which is put in place of its own if it has none yet."""
    return layer_of(module) or CompressedLayer(module, count)
