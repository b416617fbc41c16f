"""The one file that calls torch's private API; `tests/test__compat.py` fails by name when a new torch changes it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import ModuleType
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
    from torch.utils._pytree import tree_leaves

    asks_device = torch.ops.prim.device.default

    def answer(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is asks_device and hasattr(args[0], "fake_device"):
            return args[0].fake_device
        result = func(*args, **kwargs)
        see(tree_leaves(result))
        return result

    return dispatch_mode(answer)


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl  # `__torch_function__` of a class that overrides none


def dispatch_mode(answer: Callable[[Any, Any, dict[str, Any]], Any]) -> AbstractContextManager[Any]:
    """Call `answer(operation, args, kwargs)` in place of every operation inside, those of autograd included."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
        @classmethod
        def _should_skip_dynamo(cls) -> bool:
            return False  # otherwise the first operation imports torch's compiler

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return answer(func, args, kwargs or {})

    return Mode()  # type: ignore[no-untyped-call]


def wrapper_tensor(cls: Any, layout: tuple[Any, ...], device: torch.device) -> Any:
    """Return a tensor of a subclass with `__torch_dispatch__`, without memory.

    layout: shape, stride, offset, dtype.
    """
    shape, stride, offset, dtype = layout
    make: Any = getattr(torch.Tensor, "_make_wrapper_subclass")  # noqa: B009 - torch's stubs lack some arguments
    return make(cls, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device)


def has_fake_rule(func: Any) -> bool:
    """Return whether torch's fake tensors have a rule for an operation, in place of or before its meta kernel."""
    from torch._subclasses.fake_impls import op_implementations_checks

    return any(is_for(func) for is_for, _ in op_implementations_checks)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Run torch's meta kernels inside without importing torch's compiler, which takes 0.8 s and 70 MB.

    Kernels in Python import it on their first call, to be left out of graphs; nothing is compiled here.  A module
    with this one function stands in for it, and what it answered is forgotten at the end.  Beside other threads,
    which may compile, the compiler is imported; the thread of progress.py only writes its line.
    """
    name, marked = "torch._dynamo", []

    def disable(function: Any, *_: Any, **__: Any) -> Any:
        marked.append(function)
        return function

    others = [thread for thread in threading.enumerate() if thread.name != "zengine-progress"]
    if name in sys.modules or len(others) > 1:
        yield
        return
    sys.modules[name] = stand_in = ModuleType(name)
    vars(stand_in)["disable"] = disable
    try:
        yield
    finally:
        del sys.modules[name]
        for function in marked:
            vars(function).pop("__dynamo_disable", None)


def storage_key(tensor: torch.Tensor) -> tuple[int, Callable[[], Any]]:
    """Return a number of the tensor's storage, and a function that makes a weak reference to it.

    As long as the reference lives, no other storage gets the number.
    """
    storage = tensor.untyped_storage()
    return storage._cdata, lambda: _weak_storage(storage)


def _weak_storage(storage: Any) -> Any:
    from torch.multiprocessing.reductions import StorageWeakRef

    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def softmax_backward(grad: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the gradient of what a softmax over the last dim read; `weights` is what it gave."""
    known = getattr(torch, "_softmax_backward_data", None)
    if known is None:
        return weights * (grad - (grad * weights).sum(-1, keepdim=True))
    found: torch.Tensor = known(grad, weights, -1, weights.dtype)
    return found
