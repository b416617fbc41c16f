"""Notes on errors of torch in forward and backward: what the engine was given, and what to do.

torch's text names a kernel's view ("expected target dtype to be Long"), not the argument that the caller passed.  The
error stays as it is, type and text, so that code which catches it still does; a note (`BaseException.add_note`) lists
the tensors of the call and the remedy.  Errors that no row matches get none.

Rejected: checking inputs before the call, which costs time in every step and cannot know what a model accepts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

import zcomm

__all__ = ["note_backward", "note_forward"]

_FORWARD = (
    (
        r"target dtype|scalar type Long|nll_loss.* not implemented for",
        "Class labels are int64 indices, and probabilities are floating: pass labels.long() for indices",
    ),
    (r"same device", "Move the batch to the device of the model: batch.to(engine.device)"),
    (
        r"dtype|scalar type|same type|not implemented for",
        "Cast floating inputs to the dtype of the model, x.to(dtype), and pass token ids as int64",
    ),
    (
        r"cannot be multiplied|size mismatch|must match the size|shape",
        "Compare the shapes with the sizes of the model's layers: the first dimension is the batch",
    ),
    (r"out of (bounds|range)", "Labels and token ids count from 0 to the number of classes (or the vocabulary) - 1"),
    (r"must be Tensor", "Pass tensors: torch.as_tensor(x), or a collate_fn that makes them"),
)
_TWICE = (
    "engine: this graph was differentiated before and is freed. Call engine.backward(loss) once per loss = "
    "engine(...); for a second backward of the same loss compute it again, or pass retain_graph=True to the first; "
    "add several losses of one forward before a single backward, (loss1 + loss2)."
)


def note_forward(error: Exception, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Add a note to an error of `module(*args, **kwargs)` that comes from its inputs."""
    remedy = next((advice for pattern, advice in _FORWARD if re.search(pattern, str(error))), "")
    if (
        not remedy
        or isinstance(error, zcomm.CollectiveFailed)
        or not isinstance(error, (RuntimeError, IndexError, TypeError, ValueError))
    ):
        return
    arguments = {**{f"argument {index}": each for index, each in enumerate(args)}, **kwargs}
    given = ", ".join(list(_described(arguments, ""))[:8]) or "no tensors"
    first = next(module.parameters(), None)
    weights = "" if first is None else f"; the model's weights are {_dtype(first)} on {first.device}"
    error.add_note(f"engine: forward() got {given}{weights}. {remedy}.")


def note_backward(error: RuntimeError) -> None:
    """Add a note to the error of a second backward through one graph."""
    if "through the graph a second time" in str(error):
        error.add_note(_TWICE)


def _described(value: Any, name: str) -> Iterator[str]:
    """Yield place, dtype, shape and device of each tensor in nested containers, and place and type of the rest."""
    if isinstance(value, Tensor):
        yield f"{name} {_dtype(value)} {tuple(value.shape)} on {value.device}"
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _described(each, f"{name}[{key!r}]" if name else str(key))
    elif isinstance(value, (tuple, list)) and any(isinstance(each, (Tensor, tuple, list, Mapping)) for each in value):
        for index, each in enumerate(value):
            yield from _described(each, f"{name}[{index}]")
    elif value is not None:
        yield f"{name} ({type(value).__name__})"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
