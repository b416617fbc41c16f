"""The one file that calls torch's private API; `tests/test__compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
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


# History of CUDA's allocator.

MAX_ENTRIES = 200_000  # allocations and frees that are kept, the newest


def begin_memory_history() -> bool:
    """Let CUDA's allocator remember what it does, with the Python stacks; False where this torch cannot."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return False
    record(max_entries=MAX_ENTRIES)
    return True


def end_memory_history(path: Path) -> bool:
    """Write what was remembered to `path` and stop; False where this torch cannot."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if dump is None or record is None:
        return False
    try:
        dump(str(path))
    finally:
        record(enabled=None)
    return True


# Dry runs: tensors without storage, and a view of every operation.  Where torch lacks them `have_dry_runs()` is
# False: plans cover the partition alone, and activations have to be measured.


def have_dry_runs() -> bool:
    """Return whether this torch has what a dry run needs."""
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: F401
        from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
        from torch.utils._pytree import tree_leaves  # noqa: F401
    except ImportError:
        return False
    return True


def fake_tensors() -> AbstractContextManager[Any]:
    """Inside, tensors have a shape, a dtype, a device and no storage; operations allocate nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def watching(see: Callable[[list[Any]], None]) -> AbstractContextManager[Any]:
    """Inside, `see` is given the results of every operation, also of those that autograd carries out."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            see(tree_leaves(result))
            return result

    return Watch()  # type: ignore[no-untyped-call]
