"""The one file that calls torch's private API; `tests/test__compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

_ENGINE: Any = getattr(torch.autograd.Variable, "_execution_engine", None)

TELLS_END = hasattr(_ENGINE, "queue_callback")  # autograd can call back at the end of a backward


def at_end_of_backward(callback: Callable[[], None]) -> bool:
    """Make autograd call `callback` after the running backward succeeds; return False if this torch cannot.

    `backward()` raises the errors of the callback.
    """
    if not TELLS_END:
        return False
    _ENGINE.queue_callback(callback)
    return True


def backward_number() -> int:
    """Return a number of the backward that this thread is running; 0 if there is none, or torch does not know."""
    task = getattr(torch._C, "_current_graph_task_id", None)
    return 0 if task is None else int(task()) + 1


def cpu_has_fp16() -> bool:
    """Return True if torch has fp16 matrix kernels for this CPU; False if torch does not know."""
    known = getattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", None)
    try:
        return known is not None and bool(known())
    except RuntimeError:  # torch was built without oneDNN
        return False


def inside_functorch() -> bool:
    """Return True inside torch.func.grad, vmap and the like; False if this torch does not tell."""
    peek = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", None)
    return peek is not None and peek() is not None


def when_cuda_starts(callback: Callable[[], Any]) -> Any:
    """Call `callback` when CUDA is initialized: now if it is, or if this torch has no queue for it."""
    cuda: Any = torch.cuda
    later = getattr(cuda, "_lazy_call", None)
    return callback() if later is None or cuda.is_initialized() else later(callback)


MAX_ENTRIES = 200_000  # of the history of CUDA's allocator: the newest allocations and frees are kept


def begin_memory_history() -> bool:
    """Record CUDA's allocations with Python stacks; return False if this torch cannot."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None:
        return False
    record(max_entries=MAX_ENTRIES)
    return True


def end_memory_history(path: Path) -> bool:
    """Write the recorded allocations to `path` and stop; return False if this torch cannot."""
    dump = getattr(torch.cuda.memory, "_dump_snapshot", None)
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if dump is None or record is None:
        return False
    try:
        dump(str(path))
    finally:
        record(enabled=None)
    return True


def have_dry_runs() -> bool:
    """Return True if this torch can run on tensors without storage and observe every operation.

    Otherwise plans cover the partition alone, and activations have to be measured.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: F401
        from torch.utils._python_dispatch import TorchDispatchMode  # noqa: F401
        from torch.utils._pytree import tree_leaves  # noqa: F401
    except ImportError:
        return False
    return True


def fake_tensors() -> AbstractContextManager[Any]:
    """Give tensors made inside a shape, a dtype and a device, but no storage; operations allocate nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def watching(see: Callable[[list[Any]], None]) -> AbstractContextManager[Any]:
    """Call `see` with the results of every operation inside, those of autograd included.

    Autograd asks each fake tensor for its device, several times for each operation: these questions are answered
    here, because the way through the dispatch of fake tensors costs more than the operation.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    asks_device = torch.ops.prim.device.default

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is asks_device and hasattr(args[0], "fake_device"):
                return args[0].fake_device
            result = func(*args, **(kwargs or {}))
            see(tree_leaves(result))
            return result

    return Watch()  # type: ignore[no-untyped-call]
