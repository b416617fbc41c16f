from __future__ import annotations

import contextlib
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zprecision as zp
from zprecision.backends.gpu import launch
from zprecision.backends.gpu.launch import Program

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _ask_anew() -> Iterator[None]:
    """What was found out about this machine is not kept from test to test."""
    kept = (launch._known_reason, launch._warn_once, launch._launcher, launch._load)
    for each in kept:
        each.cache_clear()
    yield
    for each in kept:
        each.cache_clear()


def test_without_a_cuda_device_cupy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert "no CUDA device" in str(launch.reason_without())
    assert "no CUDA device" in zp.kernels().gpu
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_a_missing_cupy_is_named_with_the_extra_of_this_torch(
    version: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    assert f"pip install 'zprecision[{extra}]'" in str(launch.reason_without())


def test_rocm_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "ROCm" in str(launch.reason_without())


def test_a_cuda_device_without_kernels_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "reason_without", lambda: "CuPy is missing")
    with pytest.warns(RuntimeWarning, match="uses torch's operations on CUDA tensors: CuPy is missing"):
        assert not launch.has_gpu_kernels(CUDA)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not launch.has_gpu_kernels(CUDA)
        assert not launch.has_gpu_kernels(torch.device("cpu"))


class FakeDevice:
    """The parts of torch.cuda and CuPy that show the launches, their device and their stream."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.loaded, self.launched = 11, False, [], []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current = lambda device=None: types.SimpleNamespace(cuda_stream=self.stream)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
        monkeypatch.setattr(torch.cuda, "device", self.enter)
        monkeypatch.setattr(launch.compiler, "binary", lambda text, capability: text.encode())
        function = types.SimpleNamespace(Module=lambda: self)
        cuda = types.SimpleNamespace(Device=self.enter, function=function)
        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def enter(self, device: Any) -> Iterator[None]:
        yield

    def load(self, binary: bytes) -> None:
        self.loaded.append(binary)

    def get_function(self, name: str) -> Any:
        def kernel(grid: Any, block: Any, args: Any, *, stream: Any) -> None:
            (struct,) = args
            assert struct.size == 1, "CuPy passes arrays of one element by value"
            self.launched.append((name, grid, block, struct.tobytes(), stream.ptr))

        return kernel


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    pytest.importorskip("numpy")
    fake = FakeDevice()
    fake.install(monkeypatch)
    return fake


def test_a_launch_passes_its_bytes_by_value_on_the_stream_of_the_moment(device: FakeDevice) -> None:
    launcher, program = launch.CupyLauncher(CUDA), Program("zq_products", (("ZQ_TOKENS", 1),))
    launcher.launch(program, 7, b"12345678")
    device.stream, device.capturing = 22, True
    launcher.launch(program, 3, b"abcdefgh" * 20)
    assert device.launched == [
        ("zq_products", (7,), (256,), b"12345678", 11),
        ("zq_products", (3,), (256,), b"abcdefgh" * 20, 22),
    ]
    assert len(device.loaded) == 1
    assert device.loaded[0].startswith(b"#define ZQ_TOKENS 1\n")


def test_loading_during_capture_raises_with_the_remedy(device: FakeDevice) -> None:
    device.capturing = True
    with pytest.raises(RuntimeError, match="Call the same function with the same number of tokens once before"):
        launch.CupyLauncher(CUDA).launch(Program("zq_quantize"), 1, b"12345678")


def test_the_text_holds_every_file_and_includes_none_of_them() -> None:
    text = launch.kernels_source()
    assert all(part in text for part in ("ZK_GPU_H", "ZQ_GPU_H", "zq_quantize", "zq_dequantize", "zq_products"))
    assert '#include "' not in text
