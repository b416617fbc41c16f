"""Private parts of torch that a dry run needs: tensors without storage, and a view of every operation.

Fallback: on a torch without them `have_dry_runs()` is False, plans are made of what the partition needs alone, and
activations have to be measured.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

__all__ = ["fake_tensors", "have_dry_runs", "watching"]


def have_dry_runs() -> bool:
    """Whether this torch has what a dry run needs."""
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
