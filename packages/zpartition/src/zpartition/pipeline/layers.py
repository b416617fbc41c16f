"""Layers of a pipeline: specs, their construction, and their names.

Names are those of the whole model (`layers.7.weight`, `tied.embedding.weight`) on every rank, so a checkpoint of one
partitioning loads into any other.  A layer is a module, a function, or a `LayerSpec` that is built where it is
needed.

Initial weights are those of a single process: unless `seed_layers` gives each layer its own seed, every rank builds
all layers in order and keeps its own, so that random numbers are drawn alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from zpartition.deferred.on_meta import on_meta
from zpartition.pipeline.partition_layers import layer_weights


class LayerSpec:
    """Module to be built later: `LayerSpec(nn.Linear, 8, 8, bias=False)`.

    Raises TypeError if the first argument is not callable.
    """

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        if not callable(typename):
            raise TypeError(f"LayerSpec expects a module class as its first argument, got {typename!r}")
        self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

    @property
    def class_name(self) -> str:
        """Class name for `partition_method="type:REGEX"` and messages."""
        return getattr(self.typename, "__name__", type(self.typename).__name__)

    def build(self) -> nn.Module:
        """Build a new module."""
        return self.typename(*self.module_args, **self.module_kwargs)

    def __repr__(self) -> str:
        return f"LayerSpec({self.class_name})"


class TiedLayerSpec(LayerSpec):
    """Module used in several places: all specs with the same key share it, also across stages.

    forward_fn: (module, input) -> output at this place; default: the module itself.
    tied_weight_attr: accepted for compatibility with DeepSpeed; the whole module is shared.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = ("weight",),
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key, self.forward_fn = key, forward_fn


Layer = Any  # nn.Module | LayerSpec | Callable


def class_name(layer: Layer) -> str:
    """Name of a layer for `type:REGEX` and messages."""
    return layer.class_name if isinstance(layer, LayerSpec) else getattr(layer, "__name__", type(layer).__name__)


def key_of(layer: Layer) -> str:
    """Key of a tied layer; "" for all others."""
    return layer.key if isinstance(layer, TiedLayerSpec) else ""


def weights_of(layers: Sequence[Layer], method: str) -> list[float]:
    """Weigh each layer by a partition method; specs are built on the meta device to count their parameters."""
    numels = [0] * len(layers)
    if method.lower() in ("parameters", "best"):
        numels = [_numel(layer) for layer in layers]
    return layer_weights(method, numels, [class_name(layer) for layer in layers])


def _numel(layer: Layer) -> int:
    if isinstance(layer, LayerSpec):
        with torch.random.fork_rng(devices=[]):
            layer = on_meta(layer.build)
    if not isinstance(layer, nn.Module):
        return 0
    return sum(param.numel() for param in layer.parameters() if param.requires_grad)


def build(
    layers: Sequence[Layer], wanted: set[int], *, seed: int | None, seed_fn: Callable[[int], Any] = torch.manual_seed
) -> dict[int, Any]:
    """Build the layers with the given indices; a tied layer once, at its first index.

    seed: layer i is built after `seed_fn(seed + i)`; None: all in one random number stream, as one process would.
    """
    made: dict[int, Any] = {}
    first = {key_of(layer): index for index, layer in reversed(list(enumerate(layers))) if key_of(layer)}
    keys = {key_of(layers[index]) for index in wanted} - {""}
    needed = wanted | {first[key] for key in keys}
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec):
            if index in needed:
                made[index] = layer
        elif first.get(key_of(layer), index) == index and (index in needed or seed is None):
            with _seed_scope(seed, index, seed_fn):
                module = layer.build()
            if index in needed:
                made[index] = module
    return {index: made[first.get(key_of(layers[index]), index)] for index in wanted}


@contextlib.contextmanager
def _seed_scope(seed: int | None, index: int, seed_fn: Callable[[int], Any]) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        seed_fn(seed + index)
        yield
