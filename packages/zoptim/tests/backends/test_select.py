from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zoptim.backends import gpu, native
from zoptim.backends import select as backends
from zoptim.backends.cpu import CpuJob


def test_cpu_tensors_are_updated_by_the_c_kernels() -> None:
    device = torch.device("cpu")
    assert backends.reason_without_kernels(device) is None
    assert backends.job_for(device) is CpuJob


def test_without_the_extension_the_cpu_has_the_reason_of_native() -> None:
    with native.use_level("none"):
        assert backends.reason_without_kernels(torch.device("cpu")) == native.reason_without()


def test_cuda_devices_ask_the_gpu_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "reason_without", lambda: "no CuPy here")
    assert backends.reason_without_kernels(torch.device("cuda")) == "no CuPy here"
    assert backends.job_for(torch.device("cuda", 1)) is gpu.GpuJob


@pytest.mark.parametrize("name", ["meta", "mps", "xpu"])
def test_other_devices_have_none_and_are_named(name: str) -> None:
    assert backends.reason_without_kernels(torch.device(name)) == f"there are no kernels for {name} devices"


def test_importing_zoptim_imports_neither_cupy_nor_the_gpu_package_nor_the_extension() -> None:
    """`import zoptim` must stay cheap, and must not fail for optional dependencies."""
    names = ("cupy", "cffi", "zoptim.backends.gpu", "zoptim._kernels")
    code = f"import sys, zoptim; print([name for name in {names} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_has_kernels_returns_a_bool(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backends.has_kernels("meta") is False
    assert backends.has_kernels("cpu") is (native.reason_without() is None)
