"""Load the simulated CUDA device around `import torch`, in every process whose PYTHONPATH has this folder.

Ranks, forkservers and subprocesses of tests inherit the variable, so all of them see the device.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent.parent.parent))


class _After(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Wraps the loaders of torch, of the module that runs ranks, and of those that call C kernels."""

    NAMES = ("torch", "zcomm.testing.rank", "zoptim.backends.cpu", "zoptim.backends.stats")

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in self.NAMES or name in self.inner:
            return None
        self.inner[name] = None  # the finders below may ask again
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        self.inner[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        result: ModuleType | None = self.inner[spec.name].create_module(spec)
        return result

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        loader = self.inner[name]
        module.__spec__.loader = module.__loader__ = loader  # type: ignore[union-attr]
        if name != "torch":
            loader.exec_module(module)
            from simulated_cuda import c_kernels, ranks

            install = {
                "zcomm.testing.rank": ranks.install,
                "zoptim.backends.cpu": c_kernels.install_in_cpu,
                "zoptim.backends.stats": c_kernels.install_in_stats,
            }
            install[name](module)
            return
        from simulated_cuda import library

        library.load()
        loader.exec_module(module)
        from simulated_cuda import torch_cuda, torch_distributed

        torch_cuda.install()
        torch_distributed.install()


class _WatchBranches(importlib.abc.MetaPathFinder):
    """Makes the packages' branches on a device's type record themselves (simulated_cuda.branches)."""

    PACKAGES = ("zcomm", "zprecision", "zpartition", "zoptim", "zckpt", "zengine")

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] not in self.PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.origin is None or not isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            return None
        from simulated_cuda import branches

        origin, record = spec.origin, branches.recorder()
        plain = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            if "/zengine/deepspeed/" in origin or "cu" not in Path(origin).read_text():
                plain(module)
                return
            module.__dict__[branches.RECORDER] = record
            exec(branches.watched(origin), module.__dict__)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("SIMULATED_CUDA_BRANCHES"):
    sys.meta_path.insert(0, _WatchBranches())
sys.meta_path.insert(0, _After())
