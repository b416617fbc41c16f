"""The one file that calls torch's private API; `tests/test_compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)

TELLS_END = hasattr(_ENGINE, "queue_callback")  # whether autograd calls back at the end of a backward


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Within a backward: let autograd call `callback` when it has ended well; False when this torch cannot.

    What the callback raises comes out of `backward()`.
    """
    if not TELLS_END:
        return False
    _ENGINE.queue_callback(callback)
    return True


def backward_number() -> int:
    """A number of the backward that this thread is running; 0: there is none, or torch does not tell."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return 0 if task is None else int(task()) + 1
