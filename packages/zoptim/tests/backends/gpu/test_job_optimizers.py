"""The optimizers over GpuJob, the path of CUDA tensors, on CPU tensors and fibers."""

from __future__ import annotations

import functools
import gc
import weakref
from typing import Any

import pytest
import torch

import zoptim
from zoptim.backends import native
from zoptim.backends.gpu import GpuJob
from zoptim.optimizers import flat

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels to compare with")

OPTIMIZERS: list[tuple[type[zoptim.FlatOptimizer], torch.dtype, dict[str, Any]]] = [
    (zoptim.AdamW, torch.float32, {}),
    (zoptim.AdamW, torch.bfloat16, {"split_master": True, "state_dtype": "bf16"}),
    (zoptim.Adam, torch.float32, {"amsgrad": True, "state_dtype": "8bit"}),
    (zoptim.SGD, torch.float32, {"momentum": 0.9, "nesterov": True}),
    (zoptim.SGD, torch.bfloat16, {}),
    (zoptim.Adagrad, torch.float32, {}),
    (zoptim.Lion, torch.float32, {"state_dtype": "bf16"}),
    (zoptim.LAMB, torch.float32, {}),
]


def trained(make: type[zoptim.FlatOptimizer], dtype: torch.dtype, options: dict[str, Any]) -> list[torch.Tensor]:
    """Weights after four steps with new gradient tensors each, of which the third is skipped."""
    generator = torch.Generator().manual_seed(3)
    sizes = [(40, 30), (7,), (300,), (1,)]
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in sizes]
    optimizer = make(params, lr=1e-2, weight_decay=0.01, **options)
    for step in range(4):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(dtype)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(2.0), torch.tensor(float(step == 2))
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(("make", "dtype", "options"), OPTIMIZERS)
def test_an_optimizer_trains_alike_on_either_kernels(
    make: Any, dtype: torch.dtype, options: dict[str, Any], shim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(make, dtype, options)
    monkeypatch.setattr(flat, "job_for", lambda device: functools.partial(GpuJob, launcher=shim))
    found = trained(make, dtype, options)
    assert shim.launched, "the optimizer did not ask for its job where this test put another"
    exact = make is not zoptim.LAMB  # whose norms are added up in another order
    torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-6, atol=0 if exact else 1e-7)


@pytest.mark.parametrize("make", [zoptim.AdamW, zoptim.LAMB])
def test_no_step_keeps_a_gradient_alive(make: Any, shim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flat, "job_for", lambda device: functools.partial(GpuJob, launcher=shim))
    params = [torch.nn.Parameter(torch.ones(40, 30)), torch.nn.Parameter(torch.ones(7))]
    optimizer = make(params)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        grads = [weakref.ref(param.grad) for param in params]
        optimizer.step()
        optimizer.zero_grad()
        gc.collect()
        assert [grad() for grad in grads] == [None, None]
    assert shim.launched
