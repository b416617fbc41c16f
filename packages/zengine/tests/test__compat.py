"""Private torch APIs: these tests fail by name on a torch that has changed them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zengine import _compat


def test_autograd_calls_back_once_at_the_end_of_a_backward_that_ended_well():
    told: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()

    def begin(_grad: torch.Tensor) -> None:
        assert _compat.at_end_of_backward(lambda: told.append("end"))
        told.append("begin")

    loss.register_hook(begin)
    weight.register_hook(lambda _grad: told.append("weight"))
    loss.backward()
    assert told == ["begin", "weight", "end"]


def test_what_the_callback_raises_comes_out_of_backward():
    loss = torch.ones(2, requires_grad=True).sum()

    def fail() -> None:
        raise ValueError("told at the end")

    loss.register_hook(lambda _grad: _compat.at_end_of_backward(fail) and None)
    with pytest.raises(ValueError, match="told at the end"):
        loss.backward()


def test_no_callback_comes_after_a_backward_that_failed():
    told: list[str] = []
    weight = torch.ones(2, requires_grad=True)
    loss = weight.sum()
    loss.register_hook(lambda _grad: _compat.at_end_of_backward(lambda: told.append("end")) and None)
    weight.register_hook(lambda _grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    assert told == []


def test_a_backward_has_a_number_of_its_own():
    seen: list[int] = []
    assert _compat.backward_number() == 0
    for _ in range(2):
        loss = torch.ones(2, requires_grad=True).sum()
        loss.register_hook(lambda _grad: seen.append(_compat.backward_number()))
        loss.backward()
    assert 0 not in seen
    assert len(set(seen)) == 2


def test_cudas_allocator_can_be_recorded() -> None:
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert "enabled" in parameters
    assert callable(torch.cuda.memory._dump_snapshot)


def test_a_torch_without_the_record_is_said_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(torch.cuda.memory, "_record_memory_history")
    assert not _compat.begin_memory_history()
    assert not _compat.end_memory_history(tmp_path / "snapshot")


def test_what_was_recorded_is_dumped_and_the_record_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    assert _compat.begin_memory_history()
    assert _compat.end_memory_history(tmp_path / "snapshot")
    assert calls[0]["max_entries"] > 0
    assert calls[1:] == [str(tmp_path / "snapshot"), {"enabled": None}]


def test_this_torch_has_them() -> None:
    assert _compat.have_dry_runs()


def test_fake_tensors_have_no_storage_and_every_operation_is_seen() -> None:
    seen: list[object] = []
    with _compat.fake_tensors():
        huge = torch.empty(1 << 40, dtype=torch.float32)
        with _compat.watching(seen.extend):
            total = huge + 1
    assert total.shape == huge.shape
    assert seen == [total]


def test_fp16_kernels_of_the_cpu_are_known():
    assert hasattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported")
    assert isinstance(_compat.cpu_has_fp16(), bool)


def test_functorch_tells_where_it_is():
    inside: list[bool] = []
    torch.func.grad(lambda x: inside.append(_compat.inside_functorch()) or x.sum())(torch.ones(1))
    assert (inside, _compat.inside_functorch()) == ([True], False)


def test_a_callback_waits_for_cuda():
    told: list[int] = []
    _compat.when_cuda_starts(lambda: told.append(1))
    assert told == ([1] if torch.cuda.is_initialized() else [])


def test_the_gradient_of_a_softmax_is_that_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    x, above = torch.randn(3, 40).requires_grad_(), torch.randn(3, 40)
    weights = torch.softmax(x, -1)
    (wanted,) = torch.autograd.grad(weights, x, above)
    assert torch.equal(_compat.softmax_backward(above, weights.detach()), wanted)
    monkeypatch.delattr(torch, "_softmax_backward_data")
    assert torch.allclose(_compat.softmax_backward(above, weights.detach()), wanted, atol=1e-6)


def test_meta_kernels_run_without_the_compiler_which_is_whole_afterwards() -> None:
    script = """
import sys
import torch
from zengine import _compat

given = torch.empty(4, 4, device="meta")
with _compat.without_compiler():
    product = torch.ops.aten.addmm.default(given, given, given)
assert product.shape == (4, 4)
assert "torch._dynamo" not in sys.modules
assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]
with _compat.without_compiler():
    assert torch._dynamo.config is sys.modules["torch._dynamo"].config  # it is there: nothing stands in for it
assert torch.ops.aten.addmm.default(given, given, given).shape == (4, 4)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
