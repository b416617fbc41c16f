"""Buffers of models whose weights are cast."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from zprecision import Precision

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


class Codebook(nn.Module):
    """A weight, and state of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("codes", torch.tensor([1.0001, 2.0001]))
        self.register_buffer("frequencies", torch.tensor([1.0001]), persistent=False)
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("wide", torch.tensor([1.0], dtype=F64))
        self.register_buffer("narrow", torch.tensor([1.0], dtype=BF16))


@pytest.mark.parametrize("dtype", [BF16, F16])
def test_buffers_keep_their_dtype_and_bits_when_weights_become_narrow(dtype: torch.dtype) -> None:
    model = Precision(param=dtype).cast_module(Codebook())
    assert model.linear.weight.dtype == dtype
    assert model.codes.tolist() == torch.tensor([1.0001, 2.0001]).tolist()
    assert model.frequencies.tolist() == torch.tensor([1.0001]).tolist()
    assert [buffer.dtype for buffer in model.buffers()] == [F32, F32, torch.int64, F64, BF16]


def test_buffers_become_as_wide_as_wider_weights() -> None:
    model = Precision(param=F64).cast_module(Codebook())
    assert {buffer.dtype for buffer in model.buffers()} == {F64, torch.int64}
    model = Precision(param=F32).cast_module(Codebook())
    assert (model.wide.dtype, model.narrow.dtype) == (F64, F32)


def test_buffers_are_cast_when_that_is_asked() -> None:
    model = Precision(param=BF16, buffer=F16).cast_module(Codebook())
    assert {buffer.dtype for buffer in model.buffers()} == {F16, torch.int64}
    assert Precision(buffer=BF16).cast_module(Codebook()).codes.dtype == BF16


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "batch 1d": (lambda: nn.BatchNorm1d(8), (16, 8)),
    "batch 2d": (lambda: nn.BatchNorm2d(8), (4, 8, 3, 3)),
    "batch 3d without weights": (lambda: nn.BatchNorm3d(8, affine=False), (4, 8, 2, 2, 2)),
    "synchronous": (lambda: nn.SyncBatchNorm(8), (4, 8, 3, 3)),
    "instance": (lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True), (4, 8, 3, 3)),
}


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_of_300_steps_are_those_of_a_float32_norm(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # SyncBatchNorm needs a GPU in a group
    make, shape = NORMS[name]
    torch.manual_seed(0)
    narrow, oracle = Precision(param=dtype).cast_module(make()), make()
    for _ in range(300):
        x = (100.3 + torch.randn(shape)).to(dtype)
        out = narrow(x)
        oracle(x.float())
        assert out.dtype == dtype
    for key in ("running_mean", "running_var"):
        assert getattr(narrow, key).dtype == F32
        torch.testing.assert_close(getattr(narrow, key), getattr(oracle, key), rtol=1e-5, atol=1e-5)
    expected = oracle.eval()(x.float())
    torch.testing.assert_close(narrow.eval()(x).float(), expected, rtol=0.02, atol=0.02)


def test_a_norm_with_statistics_keeps_its_weights_beside_them_and_others_do_not() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False))
    Precision(param=BF16).cast_module(model)
    assert [each.weight.dtype for each in model] == [F32, BF16, BF16]
    asked = Precision(param=BF16, buffer=BF16).cast_module(nn.BatchNorm1d(2))
    assert (asked.weight.dtype, asked.running_mean.dtype) == (BF16, BF16)
    asked(torch.ones(2, 2, dtype=BF16))


@pytest.mark.parametrize(("given", "param"), [(F64, BF16), (F64, F32), (F32, F64), (F16, BF16), (BF16, BF16)])
def test_a_norm_runs_whatever_dtype_it_comes_in(given: torch.dtype, param: torch.dtype) -> None:
    norm = Precision(param=param).cast_module(nn.BatchNorm1d(2).to(given))
    assert norm(torch.ones(2, 2, dtype=param)).dtype == param
    assert norm.running_mean.dtype == (param if given == param or param in (F32, F64) else F32)


@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.parametrizations.spectral_norm])
def test_the_vectors_of_a_spectral_norm_go_with_its_weight(norm: Callable[[nn.Module], nn.Module]) -> None:
    model = Precision(param=BF16).cast_module(norm(nn.Linear(4, 4)))
    out: Tensor = model(torch.ones(2, 4, dtype=BF16))
    out.sum().backward()
    assert all(param.grad.dtype == BF16 for param in model.parameters())
