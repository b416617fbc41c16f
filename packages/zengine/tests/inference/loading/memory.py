"""Peak of the memory that torch operations allocate, in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@final
class PeakBytes(TorchDispatchMode):
    """Counts the storages that operations make, until they are freed; views and mapped files are none."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id_of(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        result = function(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and not each.is_meta and id_of(each) not in given:
                storage = each.untyped_storage()
                if id_of(each) in self._alive or is_mapped(each):
                    continue
                self._alive[id_of(each)] = (StorageWeakRef(storage), storage.nbytes())
        self._alive = {key: row for key, row in self._alive.items() if not row[0].expired()}
        self.peak = max(self.peak, self.present)
        return result

    @property
    def present(self) -> int:
        """Bytes that are allocated now."""
        return sum(nbytes for ref, nbytes in self._alive.values() if not ref.expired())


def id_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def is_mapped(tensor: Tensor) -> bool:
    """Return whether the tensor's memory is that of a file."""
    start = tensor.untyped_storage().data_ptr()
    with open("/proc/self/maps", encoding="utf-8") as file:
        for line in file:
            lo, hi = (int(each, 16) for each in line.split()[0].split("-"))
            if lo <= start < hi:
                return "/" in line
    return False


@contextmanager
def peak_bytes() -> Iterator[PeakBytes]:
    """Count inside the block."""
    counter = PeakBytes()
    with counter:
        yield counter
