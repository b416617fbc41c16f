"""The one file that calls torch's private API; `tests/test_compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Hooks", "is_in_backward", "outer_saved_tensor_hooks"]

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]  # pack, unpack


def is_in_backward() -> bool:
    """Whether autograd is running a backward in this thread; False when this torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def outer_saved_tensor_hooks() -> Hooks | None:
    """What this thread does with saved tensors now; None when nothing, or when this torch does not tell.

    torch applies only the innermost hooks, so whoever adds some must hand on what is not its own (activation
    checkpointing without re-entrance is made of such hooks).
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None:
        return None
    found: Hooks | None = top(False)
    return found
