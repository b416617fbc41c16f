from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from zoptim.backends.gpu import launch
from zoptim.backends.gpu.source import COMMON


def test_without_a_cuda_device_cupy_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert "no CUDA device" in str(launch.reason_without())
    assert "cupy" not in sys.modules


@pytest.mark.parametrize(("version", "extra"), [("12.8", "cuda12"), ("13.0", "cuda13")])
def test_a_missing_cupy_is_named_with_the_extra_of_this_torch(
    version: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setitem(sys.modules, "cupy", None)  # type: ignore[arg-type]
    assert f"pip install 'zoptim[{extra}]'" in str(launch.reason_without())


def test_rocm_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "ROCm" in str(launch.reason_without())


def fake_cupy(**nvrtc: Any) -> Any:
    return types.SimpleNamespace(cuda=types.SimpleNamespace(nvrtc=types.SimpleNamespace(**nvrtc)))


def test_a_missing_nvrtc_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_version() -> None:
        raise OSError("libnvrtc.so.13: cannot open")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(getVersion=get_version))
    assert "libnvrtc.so.13" in str(launch.reason_without())
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(getVersion=lambda: (13, 0)))
    assert launch.reason_without() is None


class FakeDevice:
    """The parts of torch.cuda and CuPy that show the launches, their device and their stream."""

    def __init__(self) -> None:
        self.stream, self.capturing, self.launched, self.inside = 11, False, [], []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        current = lambda device=None: types.SimpleNamespace(cuda_stream=self.stream)  # noqa: E731
        monkeypatch.setattr(torch.cuda, "current_stream", current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        monkeypatch.setattr(torch.cuda, "device", self.enter)
        cuda = types.SimpleNamespace(Device=self.enter)
        monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]

    @contextlib.contextmanager
    def enter(self, device: Any) -> Iterator[None]:
        self.inside.append(device)
        yield

    def kernel(self, grid: Any, block: Any, args: Any, *, stream: Any) -> None:
        (struct,) = args
        assert struct.size == 1, "CuPy passes arrays of one element by value"
        self.launched.append((grid, block, struct.tobytes(), stream.ptr))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    pytest.importorskip("numpy")
    fake = FakeDevice()
    fake.install(monkeypatch)
    return fake


def test_a_launch_passes_its_bytes_by_value_on_the_stream_of_the_moment(device: FakeDevice) -> None:
    launcher = launch.CupyLauncher(torch.device("cuda", 1))
    launcher.launch([launch.Call(device.kernel, 7, b"12345678")], [])
    device.stream, device.capturing = 22, True
    launcher.launch([launch.Call(device.kernel, 3, b"abcdefgh" * 20)], [])
    assert device.launched == [((7,), (256,), b"12345678", 11), ((3,), (256,), b"abcdefgh" * 20, 22)]
    assert device.inside == [torch.device("cuda", 1), 1] * 2


class Buffer:
    def __init__(self) -> None:
        self.recorded: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.recorded.append(stream.cuda_stream)


def test_buffers_are_kept_for_a_stream_that_did_not_make_them(device: FakeDevice) -> None:
    launcher, buffer = launch.CupyLauncher(torch.device("cuda", 0)), Buffer()
    device.stream = 22
    launcher.launch([launch.Call(device.kernel, 1, b"12345678")], [buffer])  # type: ignore[list-item]
    assert buffer.recorded == [22]
    device.capturing = True
    launcher.launch([launch.Call(device.kernel, 1, b"12345678")], [buffer])  # type: ignore[list-item]
    assert buffer.recorded == [22], "a graph keeps its memory by itself"


def test_loading_during_capture_raises_with_the_remedy(device: FakeDevice) -> None:
    device.capturing = True
    with pytest.raises(RuntimeError, match="Make one step with the same parameters before"):
        launch.CupyLauncher(torch.device("cuda", 0)).load(COMMON)
