"""Observation of one forward pass: every call of a module, with copies of its tensors.

The recognition of a decoder (recognize.py) compares numbers, not names: it must know what went into each module and
what came out.  Tensors are copied, since models may add residuals in place.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import Tensor, nn

__all__ = ["Call", "observe", "tensors_in", "uncompiled"]


@attrs.frozen(eq=False)
class Call:
    """One call of a module."""

    order: int  # of its start among all calls
    name: str  # of the module in the model
    module: nn.Module
    arguments: tuple[tuple[Any, ...], dict[str, Any]]  # as given; their tensors may have changed since
    inputs: tuple[Tensor, ...]  # tensors among the arguments, nested ones too, in order
    outputs: tuple[Tensor, ...]  # tensors among the results

    @property
    def input(self) -> Tensor:
        """The first tensor that went in."""
        return self.inputs[0]

    @property
    def output(self) -> Tensor:
        """The first tensor that came out."""
        return self.outputs[0]

    def is_inside(self, name: str) -> bool:
        """Return whether the module is `name` or below it."""
        return self.name == name or self.name.startswith(f"{name}.")


def observe(model: nn.Module, run: Callable[[], Any]) -> tuple[list[Call], Tensor]:
    """Return the calls of `run`, in order of their start, and its first tensor (the logits).  Without gradients."""
    calls: list[Call] = []
    started: list[tuple[int, tuple[Tensor, ...]]] = []
    counter = itertools.count()

    def begin(_module: nn.Module, args: Any, kwargs: Any) -> None:
        started.append((next(counter), _copies((args, kwargs))))

    def end(name: str) -> Callable[..., None]:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            order, inputs = started.pop()
            calls.append(Call(order, name, module, (args, kwargs), inputs, _copies(output)))

        return record

    handles = []
    for name, module in model.named_modules():
        if name:
            handles.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            handles.append(module.register_forward_hook(end(name), with_kwargs=True))
    try:
        with torch.no_grad(), uncompiled():  # hooks inside a graph would be traced
            result = next(tensors_in(run()))
    finally:
        for handle in handles:
            handle.remove()
    return sorted((call for call in calls if call.outputs), key=lambda call: call.order), result


def uncompiled() -> AbstractContextManager[object]:
    """Run functions of torch.compile as plain Python inside the block; free while nothing is compiled."""
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        return nullcontext()
    block: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return block


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts; `logits` of an output object first."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        ordered = [value["logits"]] if isinstance(value.get("logits"), Tensor) else value.values()
        for each in ordered:
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def _copies(value: Any) -> tuple[Tensor, ...]:
    return tuple(each.detach().clone() for each in tensors_in(value))
