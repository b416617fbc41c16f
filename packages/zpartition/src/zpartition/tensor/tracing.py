"""Trace the data flow between linear layers while a small input runs through a model.

Every computed tensor carries the names of the nearest linear layers that it was computed from; a linear layer starts
anew.  Operations are observed where Python calls them (torch's function mode), so any model that runs can be traced,
also on the meta device.  Operations that cannot be observed (a custom autograd function) carry no names, and layers
behind them stay whole.  No graph is built and nothing is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zpartition._compat import tree_flatten
from zpartition.tensor.layer_split import linear_kind

__all__ = ["LayerFlow", "trace"]

_NOTHING: frozenset[str] = frozenset()


@final
@attrs.frozen(eq=False)
class LayerFlow:
    """The observed flow; names are those of modules, in order of first execution."""

    sources: Mapping[str, frozenset[str]]  # of each linear layer: the nearest ones that its input was computed from
    leaking: frozenset[str]  # linear layers that the model's output was computed from, with none between
    norms: Mapping[str, frozenset[str]]  # of other modules that have parameters, the same as `sources`
    heads: Mapping[str, frozenset[int]]  # head counts into which a layer's outputs, or blocks of them, were viewed
    blocks: Mapping[str, tuple[int, ...]]  # sizes of several layers fused into one, whose outputs were split

    def consumers(self, name: str) -> frozenset[str]:
        """Return the linear layers whose input was computed from the outputs of `name`."""
        return frozenset(other for other, found in self.sources.items() if name in found)


def trace(model: nn.Module, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] = {}) -> LayerFlow:
    """Run `model(*args, **kwargs)` once in evaluation mode, and return the observed flow."""
    tracer = _Tracer()
    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        for name, module in model.named_modules():
            own = next(module.parameters(recurse=False), None)
            if linear_kind(module) is not None:
                stack.callback(
                    module.register_forward_pre_hook(tracer.linear_input_hook(name), with_kwargs=True).remove
                )
                stack.callback(module.register_forward_hook(tracer.linear_output_hook(name)).remove)
            elif own is not None and not isinstance(module, nn.Embedding):
                stack.callback(
                    module.register_forward_pre_hook(tracer.module_input_hook(name), with_kwargs=True).remove
                )
        stack.enter_context(torch.no_grad())
        stack.enter_context(tracer)
        out = model(*args, **kwargs)
    return tracer.flow(out)


@final
class _Tracer(TorchFunctionMode):
    """Records the sources of every computed tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []  # all that has notes: an id is a tensor's as long as it lives
        self.names: dict[int, frozenset[str]] = {}  # by id: linear layers
        self.raw: dict[int, tuple[str, int]] = {}  # by id: the layer whose outputs it is, and the first
        self.sources: dict[str, frozenset[str]] = {}
        self.norms: dict[str, frozenset[str]] = {}
        self.heads: dict[str, set[int]] = {}
        self.parts: dict[str, dict[int, int]] = {}  # by layer: first output -> number of outputs taken
        self.widths: dict[str, int] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = _tensors((args, kwargs))
        names = self.names_of(given)
        made = _tensors(out)
        for tensor in made if names else ():
            self.record(tensor, names | self.names.get(id(tensor), _NOTHING))
        raw = [tensor for tensor in given if id(tensor) in self.raw]
        if len(raw) == 1:
            for tensor in made:
                self.track_view(raw[0], tensor)
        return out

    def linear_input_hook(self, name: str) -> Callable[..., None]:
        """Return a hook for the input of a linear layer."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.sources[name] = self.sources.get(name, _NOTHING) | self.names_of(_tensors((args, kwargs)))

        return hook

    def module_input_hook(self, name: str) -> Callable[..., None]:
        """Return a hook for the input of another module with parameters."""

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.norms[name] = self.norms.get(name, _NOTHING) | self.names_of(_tensors((args, kwargs)))

        return hook

    def linear_output_hook(self, name: str) -> Callable[..., None]:
        """Return a hook for the output of a linear layer."""

        def hook(module: nn.Module, args: Any, out: Tensor) -> None:
            self.record(out, frozenset({name}))
            self.raw[id(out)] = name, 0
            self.widths[name] = out.shape[-1]

        return hook

    def record(self, tensor: Tensor, names: frozenset[str]) -> None:
        self.kept.append(tensor)
        self.names[id(tensor)] = names
        self.raw.pop(id(tensor), None)

    def names_of(self, tensors: Iterable[Tensor]) -> frozenset[str]:
        """Return the layers that any of `tensors` was computed from."""
        return _NOTHING.union(*(self.names.get(id(tensor), _NOTHING) for tensor in tensors))

    def track_view(self, before: Tensor, after: Tensor) -> None:
        """Track `after`, computed from a layer's outputs `before` alone: a part, a view, or the same shape."""
        name, start = self.raw[id(before)]
        if after.shape == before.shape:
            self.raw[id(after)] = name, start
        elif after.dim() == before.dim() and after.shape[:-1] == before.shape[:-1]:
            first = start + int(after.storage_offset() - before.storage_offset())
            self.parts.setdefault(name, {})[first] = after.shape[-1]
            self.raw[id(after)] = name, first
        elif after.numel() == before.numel():
            self.record_view(name, before.shape[-1], tuple(after.shape))

    def record_view(self, name: str, width: int, shape: tuple[int, ...]) -> None:
        """Record that outputs (..., width) were viewed as `shape`: (..., heads, size), or (..., 3, heads, size)."""
        ends = (shape[at:] for at in range(len(shape) - 2, -1, -1))
        dims = next((end for end in ends if math.prod(end) == width), ())
        if len(dims) > 2 and dims[0] in (2, 3) and dims[1] not in (2, 3):
            self.parts[name] = {at * width // dims[0]: width // dims[0] for at in range(dims[0])}
            dims = dims[1:]
        if dims:
            self.heads.setdefault(name, set()).add(dims[0])

    def flow(self, out: Any) -> LayerFlow:
        """Return the flow, once the model returned `out`."""
        blocks = {}
        for name, parts in self.parts.items():
            sizes = tuple(size for _, size in sorted(parts.items()))
            starts = [sum(sizes[:index]) for index in range(len(sizes))]
            if sorted(parts) == starts and sum(sizes) == self.widths[name]:
                blocks[name] = sizes
        heads = {name: frozenset(numbers) for name, numbers in self.heads.items()}
        return LayerFlow(self.sources, self.names_of(_tensors(out)), self.norms, heads, blocks)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
