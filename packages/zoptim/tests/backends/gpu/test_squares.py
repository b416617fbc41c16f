from __future__ import annotations

from typing import Any

import pytest
import torch

from zoptim.backends.gpu import SquaresJob, grad_stats


def norm_of(grads: list[torch.Tensor]) -> float:
    return float(torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt())


def some_grads() -> list[torch.Tensor]:
    torch.manual_seed(0)
    sizes = [1, 255, 1000, 16384, 16385, 40000, 0]
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    return [torch.randn(size).to(dtypes[k % 3]) for k, size in enumerate(sizes)]


def test_the_norm_is_that_of_float64(shim: Any) -> None:
    grads = some_grads()
    norm, found_inf = grad_stats(grads, shim)
    assert float(norm) == pytest.approx(norm_of(grads), rel=1e-12)
    assert found_inf.item() == 0.0
    assert (norm.dtype, found_inf.dtype) == (torch.float64, torch.float32)


def test_two_launches_measure_300_tensors_of_several_dtypes(shim: Any) -> None:
    grads = [torch.ones(k % 5 + 1, dtype=(torch.float32, torch.bfloat16)[k % 2]) for k in range(300)]
    norm, _ = grad_stats(grads, shim)
    assert shim.names() == ["zk_squares", "zk_squares_final"]
    assert float(norm) == pytest.approx(norm_of(grads), rel=1e-12)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("position", [0, 4000, 16384])
def test_one_element_that_is_not_finite_is_found(bad: float, position: int, shim: Any) -> None:
    grad = torch.zeros(16385)
    grad[position] = bad
    assert grad_stats([torch.ones(3), grad], shim)[1].item() == 1.0


def test_squares_that_float32_cannot_hold_count(shim: Any) -> None:
    norm, found_inf = grad_stats([torch.tensor([3e30, 4e30]), torch.tensor([1e-30])], shim)
    assert float(norm) == pytest.approx(5e30, rel=1e-6)
    assert found_inf.item() == 0.0
    norm, _ = grad_stats([torch.tensor([3e-30, 4e-30])], shim)
    assert float(norm) == pytest.approx(5e-30, rel=1e-6)


def test_a_row_may_begin_anywhere_and_gives_the_same_bits(shim: Any) -> None:
    base = torch.randn(20003)
    here, there = base[:20000].clone(), torch.cat([torch.ones(3), base[:20000]])[3:]
    assert torch.equal(grad_stats([here], shim)[0], grad_stats([there], shim)[0])


def test_gradients_with_gaps_are_read_as_they_are_seen(shim: Any) -> None:
    grads = [torch.arange(12.0).view(3, 4)[:, ::2], torch.arange(6.0).view(2, 3).t()]
    assert float(grad_stats(grads, shim)[0]) == pytest.approx(norm_of(grads), rel=1e-12)


def test_other_floating_dtypes_are_measured_by_torch_beside(shim: Any) -> None:
    grads = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.float64)]
    assert float(grad_stats(grads, shim)[0]) == pytest.approx(5.0, rel=1e-12)
    assert grad_stats([torch.tensor([float("inf")], dtype=torch.float64)], shim)[1].item() == 1.0


def test_a_job_follows_gradients_that_move(shim: Any) -> None:
    job = SquaresJob([torch.zeros(4), torch.zeros(2)], shim)
    job.bind([torch.full((4,), 2.0), torch.zeros(2)])
    assert shim.names() == ["zk_patch"]
    assert float(job.measure()[0]) == 4.0


def test_empty_gradients_have_norm_zero(shim: Any) -> None:
    norm, found_inf = grad_stats([torch.empty(0)], shim)
    assert (float(norm), float(found_inf)) == (0.0, 0.0)


def test_gradients_that_cannot_be_measured_raise_with_their_position() -> None:
    with pytest.raises(ValueError, match="no gradients"):
        grad_stats([])
    with pytest.raises(TypeError, match=r"gradient 1 is torch.int64"):
        grad_stats([torch.ones(1), torch.ones(1, dtype=torch.int64)])
    with pytest.raises(ValueError, match="gradient 1 is on meta, gradient 0 on cpu"):
        grad_stats([torch.ones(1), torch.ones(1, device="meta")])
