"""Distillation: the loss of each micro-step also compares the model's logits with those of a teacher.

The teacher is the `teacher_model` of `init_compression`.  It runs on the same inputs, in eval mode and without
gradients, after the model; so both models' activations do not exist at once, but both models' weights do, on every
rank.

    loss = (1 - weight) * the caller's loss + weight * T^2 KL(teacher / T || student / T)

A divergence lives as long as the graph behind the output does: what forward returns are views, whose nodes nothing
here holds.  So a training forward that no backward follows keeps no memory, and does not count.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from zengine.compression.start import compression_of
from zengine.compression.teacher import distillation_loss, find_logits
from zengine.data.tree import map_tensors
from zengine.engine.feature import Feature
from zengine.imports import is_pipeline

if TYPE_CHECKING:
    from zengine.config.keys.compression import Distillation
    from zengine.engine.clock import MicroStep
    from zengine.engine.parts import Run


_KEY = "zengine.distillation"


@final
class _Graph:
    """Lives as long as the nodes that hold it in their metadata."""


class Teaching(Feature):
    """Adds the divergence from a teacher's logits to the loss."""

    student: nn.Module
    teacher: nn.Module
    dtype: torch.dtype | None  # of the teacher's weights, and its inputs; None: it has none

    def __init__(self, section: Distillation) -> None:
        self.section = section
        self.inputs: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})  # of the running forward
        self.divergences: dict[int, Tensor] = {}  # of forwards since the last backward whose outputs are alive
        self._numbers = itertools.count()

    def attach(self, run: Run) -> None:
        """Move the teacher to the engine's device.

        Raises:
            ValueError: there is no teacher, or the engine is a pipeline, in which no rank has both.
        """
        if is_pipeline(run.module):
            raise ValueError(
                "compression_training.distillation needs the model's logits in the engine's forward; a pipeline has "
                "none. Add zengine.compression.distillation_loss to its loss_fn"
            )
        found = compression_of(run.module)
        if found is None or found.teacher is None:
            raise ValueError(
                "compression_training.distillation needs a teacher: call zengine.init_compression(model, config, "
                "teacher_model=teacher) before initialize()"
            )
        self.student = run.module
        self.teacher = found.teacher.to(run.device).eval()
        self.dtype = next((param.dtype for param in self.teacher.parameters() if param.is_floating_point()), None)

    @property
    def is_learning(self) -> bool:
        """True in a forward that a backward may follow."""
        return self.student.training and torch.is_grad_enabled()

    def forward_begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        self.inputs = (args, kwargs)
        return args, kwargs

    def forward_end(self, output: Any) -> Any:
        args, kwargs = self.inputs
        self.inputs = ((), {})
        if self.is_learning:
            student = find_logits(output, self.section.output)
            with torch.no_grad():
                teacher = find_logits(self.teacher(*self._cast(args), **self._cast(kwargs)), self.section.output)
            return self._watched(output, distillation_loss(student, teacher, self.section.temperature))
        return output

    def _watched(self, output: Any, divergence: Tensor) -> Any:
        """Return the output by other nodes of the graph, with which the divergence is dropped.

        An output that cannot be made anew, of another class than dicts, tuples and dataclasses, is returned as it is;
        then the divergence waits for the next backward.
        """
        graph, number = _Graph(), next(self._numbers)

        def watch(each: Tensor) -> Tensor:
            if each.grad_fn is None:
                return each
            view = each.view_as(each)
            _notes_of(view)[_KEY] = graph
            return view

        self.divergences[number] = divergence
        output = _made_anew(output, watch)
        if _notes_of(find_logits(output, self.section.output)).get(_KEY) is graph:
            weakref.finalize(graph, self.divergences.pop, number, None).atexit = False
        return output

    def _cast(self, inputs: Any) -> Any:
        return map_tensors(inputs, lambda each: each.to(self.dtype) if each.is_floating_point() else each)

    def backward_begin(self, micro: MicroStep, loss: Tensor) -> Tensor:
        divergences = list(self.divergences.values())
        self.divergences.clear()
        if not divergences:
            return loss
        divergence = torch.stack(divergences).mean()
        return (1 - self.section.weight) * loss + self.section.weight * divergence.to(loss.dtype)


def _notes_of(tensor: Tensor) -> dict[str, Any]:
    """Return what is noted at the node that made a tensor, for as long as that lives; nothing if there is none."""
    notes: Any = {} if tensor.grad_fn is None else tensor.grad_fn.metadata  # torch's stubs say a method
    return notes  # type: ignore[no-any-return]


def _made_anew(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return the output with changed tensors; outputs of Transformers are dataclasses that reject `update`."""
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output) if field.init]
        return dataclasses.replace(output, **{name: map_tensors(getattr(output, name), change) for name in names})
    return map_tensors(output, change)
