"""Loading of the extension: levels, the environment variable, reasons, and the digest of the sources."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zprecision as zp
from zprecision.backends import native, squares


def fresh(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)


needs_kernels = pytest.mark.skipif(native.library() is None, reason="the kernels are not built")


def test_importing_loads_neither_the_extension_nor_quantization() -> None:
    code = (
        "import sys, zprecision;"
        "loaded = {'zprecision._kernels', '_cffi_backend', 'cffi', 'zprecision.quant'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    done = fresh(code)
    assert done.returncode == 0, done.stderr


@needs_kernels
def test_kernels_shows_the_level_in_use_and_those_that_run() -> None:
    found = zp.kernels()
    assert found.cpu in found.levels
    assert found.cpu == found.levels[-1] or os.environ.get(native.VARIABLE)
    with native.use_level(found.levels[0]):
        assert zp.kernels().cpu == found.levels[0]
    with native.use_level("none"):
        off = zp.kernels()
        assert (off.cpu, off.levels, off.threads) == ("the kernels are switched off", (), native.POOL)
    assert zp.kernels() == found


def test_the_variable_forces_a_level_or_none() -> None:
    done = fresh("import zprecision; print(zprecision.kernels().cpu)", ZPRECISION_KERNELS="none")
    assert done.stdout.strip() == "ZPRECISION_KERNELS=none is set"
    done = fresh("import zprecision; zprecision.kernels()", ZPRECISION_KERNELS="mmx")
    assert "ZPRECISION_KERNELS=mmx names no kernels of zprecision. Allowed: avx512vnni, avx512, avx2" in done.stderr


@needs_kernels
def test_a_level_that_does_not_run_here_is_rejected() -> None:
    stranger = next(name for name in native.LEVELS if name not in zp.kernels().levels)
    with (
        pytest.raises(ValueError, match=f"does not run zprecision's {stranger} kernels. Allowed: "),
        native.use_level(stranger),
    ):
        pass


def test_a_missing_extension_is_the_reason_and_torch_serves() -> None:
    code = (
        "import sys; sys.modules['zprecision._kernels'] = None\n"
        "import torch, zprecision\n"
        "print(zprecision.kernels().cpu)\n"
        "weight = zprecision.quantize(torch.ones(16, 64), 'int8')\n"
        "print(zprecision.linear(torch.ones(1, 64), zprecision.pack(weight)).sum().item())\n"
        "print(zprecision.inspect([torch.ones(4)]).norm.item())\n"
    )
    lines = fresh(code).stdout.split("\n")
    assert "the extension zprecision._kernels is not built" in lines[0]
    assert float(lines[1]) == pytest.approx(16 * 64, rel=1e-3)
    assert float(lines[2]) == 2.0


@pytest.mark.skipif(native._checkout() is None, reason="needs the source tree")
def test_a_checkout_rejects_an_extension_that_is_older_than_its_sources() -> None:
    with pytest.raises(ImportError, match=r"built from other sources .* Run python3 tools/dev\.py build"):
        native._check_current("0" * 16)


def test_memory_is_plain_unless_a_class_takes_over_functions_or_operators() -> None:
    class Marked(nn.Parameter):
        @property
        def number(self) -> int:
            return 3

    class Functions(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return super().__torch_function__(func, types, args, kwargs or {})

    class Operators(nn.Parameter):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    class Other(torch.Tensor): ...

    param = nn.Parameter(torch.ones(3))
    assert native.is_addressable(param)
    assert native.is_addressable(torch.ones(3))
    assert not native.is_addressable(torch.ones(3, device="meta"))
    for kind, is_plain in ((Marked, True), (Functions, False), (Operators, False), (Other, False)):
        param.__class__ = kind if issubclass(kind, nn.Parameter) else param.__class__
        found = param if isinstance(param, kind) else torch.ones(3).as_subclass(kind)
        assert native.is_addressable(found) is is_plain, kind


def test_squares_of_other_devices_and_dtypes_are_left_to_torch() -> None:
    assert squares.sum_of_squares([]) is None
    assert squares.sum_of_squares([torch.ones(2, dtype=torch.float64)]) is None
    assert squares.sum_of_squares([torch.ones(2, device="meta")]) is None


def test_the_package_is_where_its_sources_are() -> None:
    assert Path(zp.__file__).parent == native.PACKAGE
