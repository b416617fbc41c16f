"""CUDA graphs of forward passes (`enable_cuda_graph`): one for each signature of the inputs.

A graph repeats what was captured, on the same memory.  So each signature (shapes and dtypes of the tensors, and all
other arguments) has its own graph with its own input memory, into which a call copies its tensors; outputs are copied
out, so that the next call does not change them.

A call whose tensors are not on the GPU, or that has an argument that cannot be compared, runs without a graph.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Any, final

import attrs
import torch
from torch import Tensor, nn

from zengine.data.tree import iter_tensors, map_tensors
from zengine.deepspeed.accelerator import get_accelerator

__all__ = ["MOST_GRAPHS", "GraphedModule"]

MOST_GRAPHS = 32  # signatures that are kept; the least recently used is dropped
_WARM_UPS = 3  # passes before a capture: kernels are chosen, memory is allocated

Replay = Callable[[], Any]  # runs the captured pass, and returns its outputs


@attrs.frozen(eq=False)
class _Captured:
    inputs: Any  # nest of tensors that the graph reads
    replay: Replay


def capture_on_gpu(run: Callable[[], Any]) -> Replay:
    """Return a function that replays `run` as a CUDA graph."""
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    accelerator = get_accelerator()
    graph = accelerator.create_graph()
    with accelerator.capture_to_graph(graph):
        outputs = run()

    def replay() -> Any:
        accelerator.replay_graph(graph)
        return outputs

    return replay


@final
@attrs.define(eq=False)
class GraphedModule:
    """Calls of a module by graphs; see the module's docstring."""

    module: nn.Module
    can_capture: Callable[[Tensor], bool] = lambda tensor: tensor.is_cuda
    capture: Callable[[Callable[[], Any]], Replay] = capture_on_gpu
    graphs: collections.OrderedDict[Hashable, _Captured] = attrs.field(factory=collections.OrderedDict)

    def __reduce__(self) -> tuple[type[GraphedModule], tuple[nn.Module]]:
        return GraphedModule, (self.module,)  # graphs belong to this process and to this memory

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module without gradients; outputs are new memory."""
        tensors = list(iter_tensors((args, kwargs)))
        key = _signature((args, kwargs))
        if key is None or not tensors or not all(self.can_capture(each) for each in tensors):
            return self.module(*args, **kwargs)
        if key not in self.graphs:
            self._capture(key, args, kwargs)
        self.graphs.move_to_end(key)
        found = self.graphs[key]
        for place, tensor in zip(iter_tensors(found.inputs), tensors):
            place.copy_(tensor, non_blocking=True)
        return _copied(found.replay())

    def _capture(self, key: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = map_tensors((args, kwargs), torch.clone)
        while len(self.graphs) >= MOST_GRAPHS:
            self.graphs.popitem(last=False)
        self.graphs[key] = _Captured(inputs, self.capture(lambda: self.module(*inputs[0], **inputs[1])))


def _signature(value: Any) -> Hashable | None:
    """Return what a graph depends on; None if something cannot be compared."""
    try:
        found = _frozen(value)
        hash(found)
    except TypeError:
        return None
    return found


def _frozen(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.device
    if isinstance(value, (tuple, list)):
        return type(value), tuple(_frozen(each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _frozen(each)) for key, each in value.items())
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return type(value), value
    raise TypeError(f"{type(value).__name__} cannot be compared")


def _copied(value: Any) -> Any:
    """Return outputs in new memory; dicts of other classes (Transformers' ModelOutput) keep their class."""
    if isinstance(value, dict) and type(value) is not dict:
        return type(value)(**{key: _copied(each) for key, each in value.items()})
    return map_tensors(value, torch.clone)
