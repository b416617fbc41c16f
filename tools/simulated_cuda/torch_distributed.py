"""torch.distributed's "nccl" over the simulated device: ProcessGroupNCCL made of Gloo and csrc/collectives.cpp."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import types
from datetime import timedelta
from typing import Any

from simulated_cuda.build import build

__all__ = ["install"]


class _Options:
    """ProcessGroupNCCL.Options: whatever torch sets."""

    _timeout = timedelta(minutes=10)
    is_high_priority_stream = False


class _Kind(type):
    """Makes the C++ back end an instance of ProcessGroupNCCL."""

    def __instancecheck__(cls, instance: object) -> bool:
        name = getattr(instance, "name", None)
        return callable(name) and name() == "nccl"


class ProcessGroupNCCL(metaclass=_Kind):
    """The constructor that torch.distributed calls."""

    Options = _Options

    def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
        import torch.distributed as dist

        limit = _Options._timeout if options is None else options._timeout
        return _collectives().make(dist.ProcessGroupGloo(store, rank, size, limit))


def _collectives() -> Any:
    """Return the extension module; it is imported with the first group."""
    path = str(build()["collectives"])
    loader = importlib.machinery.ExtensionFileLoader("collectives", path)
    spec = importlib.util.spec_from_file_location("collectives", path, loader=loader)
    assert spec is not None
    module: types.ModuleType = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install() -> None:
    """Replace torch.distributed's NCCL, which a CPU wheel lacks."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    if not dist.is_available():
        return
    c10d._NCCL_AVAILABLE = True
    c10d.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
    dist.ProcessGroupNCCL = ProcessGroupNCCL  # type: ignore[misc]
