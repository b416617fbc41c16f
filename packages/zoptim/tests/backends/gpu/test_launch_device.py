"""Launches on a GPU.  Skipped without one; needs no extension."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zoptim.backends.contract import Flag, Hyper, Streams
from zoptim.backends.gpu import GpuJob, SquaresJob, grad_stats, reason_without
from zoptim.backends.gpu import launch as launching
from zoptim.backends.signals import Signals

pytestmark = pytest.mark.skipif(reason_without() is not None, reason=str(reason_without()))

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.02, min_ratio=0.01, max_ratio=8.0)
CASES = [
    "adam: f32 f32 f32",
    "adam decoupled: f32 bf16 f32 bf16",
    "adam decoupled: split bf16 f32",
    "adam: split bf16 bf16",
    "adam: bf16 bf16 bf16",
    "adam amsgrad: f32 f16 q8 f16",
    "sgd nesterov: f32 f32 f32",
    "sgd: f16 f16 -",
    "adagrad: f32 f32 q8",
    "lion decoupled: f32 bf16 bf16 bf16",
    "lamb: f32 f32 f32",
    "lamb eps_inside: split bf16 q8",
]


def on(device: str, streams: Streams) -> Streams:
    """Copy streams to a device; rows of one tensor still share their count, and rows keep their alignment."""
    moved: dict[int, torch.Tensor] = {}

    def move(tensor: torch.Tensor) -> torch.Tensor:
        base = tensor if tensor._base is None else tensor._base
        there = moved.setdefault(id(base), base.to(device))
        if there.dtype is not tensor.dtype:
            there = there.view(tensor.dtype)
        return (
            there if tensor._base is None else there[tensor.storage_offset() : tensor.storage_offset() + len(tensor)]
        )

    lists = {
        name: [move(t) for t in getattr(streams, name)]
        for name in ("weights", "grads", "remainders", "copies", "steps")
    }
    pairs = {name: tuple([move(t) for t in part] for part in getattr(streams, name)) for name in ("states", "scales")}
    return Streams(**lists, **pairs)


def same_bits(ours: Streams, theirs: Streams) -> None:
    for one, other in zip([*ours.written(), ours.grads], [*theirs.written(), theirs.grads]):
        for a, b in zip(one, other):
            assert torch.equal(a.cpu().view(-1).view(torch.uint8), b.cpu().view(-1).view(torch.uint8))


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gives_the_bits_of_the_same_text_on_a_cpu(name: str, offset: int, shim: Any, make_case: Any) -> None:
    """These are the bits of the C kernels: test_job_kernels.py."""
    case = make_case(name, offset=offset, numels=(1, 255, 256, 1027, 3 * 8192 + 515, 50_000))
    cpu = case.streams()
    gpu = on("cuda", case.streams())
    jobs = GpuJob(case.rule, case.flags, cpu, launcher=shim), GpuJob(case.rule, case.flags, gpu)
    for _ in range(3):
        jobs[0].step(HYPER, Signals(torch.tensor(4.0), torch.tensor(0.0)))
        jobs[1].step(HYPER, Signals(torch.tensor(4.0, device="cuda"), torch.tensor(0.0, device="cuda")))
    same_bits(gpu, cpu)


def test_the_norm_has_the_bits_of_the_same_text_on_a_cpu(shim: Any) -> None:
    torch.manual_seed(0)
    grads = [
        torch.randn(n).to(dtype) for n in (5, 70_000) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert torch.equal(grad_stats([grad.cuda() for grad in grads])[0].cpu(), grad_stats(grads, shim)[0])


@pytest.mark.parametrize("fast", ["foreach", "fused"])
def test_adamw_follows_torch(fast: str) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(n, device="cuda") for n in (7, 1000, 70_001)]
    ours, theirs = [weight.clone() for weight in weights], [weight.clone().requires_grad_() for weight in weights]
    zeros = [[torch.zeros_like(weight) for weight in weights] for _ in range(2)]
    grads = [torch.randn_like(weight) for weight in weights]
    steps = [torch.zeros((), device="cuda") for _ in weights]
    job = GpuJob("adam", Flag.DECOUPLED, Streams(weights=ours, grads=grads, states=(zeros[0], zeros[1]), steps=steps))
    reference = torch.optim.AdamW(theirs, 3e-3, (0.9, 0.99), 1e-6, 0.02, **{fast: True})
    for _ in range(20):
        job.step(HYPER, Signals())
        for weight, grad in zip(theirs, grads):
            weight.grad = grad.clone()
        reference.step()
        for grad in grads:
            grad.mul_(-0.7).add_(0.01)
    for mine, other in zip(ours, theirs):
        torch.testing.assert_close(mine, other.detach(), rtol=1e-5, atol=1e-6)


def sgd_job(grad: torch.Tensor, **more: Any) -> tuple[torch.Tensor, GpuJob]:
    weight = torch.zeros_like(grad)
    return weight, GpuJob("sgd", 0, Streams(weights=[weight], grads=[grad], **more))


def test_skipping_is_decided_on_the_device() -> None:
    grad = torch.ones(1000, device="cuda")
    step = torch.zeros((), device="cuda")
    weight, job = sgd_job(grad, steps=[step])
    job.step(Hyper(lr=1.0), Signals(None, torch.ones((), device="cuda")))
    assert (weight.abs().sum().item(), step.item()) == (0.0, 0.0)
    job.step(Hyper(lr=1.0), Signals(torch.tensor(2.0, device="cuda"), torch.zeros((), device="cuda")))
    assert (weight.unique().tolist(), step.item()) == ([-0.5], 1.0)


def test_no_step_waits_for_the_device() -> None:
    grads = [torch.ones(1000, device="cuda") for _ in range(3)]
    weight, job = sgd_job(grads[0])
    lr = torch.tensor(0.5, device="cuda")
    job.step(Hyper(lr=lr), Signals())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        job.bind(Streams(weights=[weight], grads=[grads[1]]))
        job.step(Hyper(lr=lr), Signals())
        grad_stats(grads)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert weight.unique().tolist() == [-1.0]


def test_launches_go_to_the_stream_of_the_moment() -> None:
    grad = torch.ones(1 << 20, device="cuda")
    weight, job = sgd_job(grad)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would read the old gradient
        grad.fill_(3.0)
        job.step(Hyper(lr=1.0), Signals())
    torch.cuda.current_stream().wait_stream(side)
    assert weight.unique().tolist() == [-3.0]


def test_a_step_can_be_captured_and_replayed_with_scalars_that_change() -> None:
    grad, lr = torch.ones(100_000, device="cuda"), torch.tensor(1.0, device="cuda")
    step, found_inf = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    weight, job = sgd_job(grad, steps=[step])
    norm_job = SquaresJob([grad])
    job.step(Hyper(lr=lr), Signals(None, found_inf))
    norm_job.measure()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm, bad = norm_job.measure()
        job.step(Hyper(lr=lr), Signals(None, found_inf))
    assert weight.unique().tolist() == [-1.0], "capturing runs nothing"
    graph.replay()
    lr.fill_(2.0)
    grad.fill_(0.5)
    graph.replay()
    assert (weight.unique().tolist(), step.item()) == ([-3.0], 3.0)
    assert norm.item() == pytest.approx(0.5 * 100_000**0.5)
    assert bad.item() == 0.0
    found_inf.fill_(1.0)
    graph.replay()
    assert (weight.unique().tolist(), step.item()) == ([-3.0], 3.0)


def test_gradients_that_moved_are_pointed_to_inside_a_graph() -> None:
    first, second = torch.ones(1000, device="cuda"), torch.full((1000,), 2.0, device="cuda")
    weight, job = sgd_job(first)
    job.step(Hyper(lr=1.0), Signals())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job.bind(Streams(weights=[weight], grads=[second]))
        job.step(Hyper(lr=1.0), Signals())
    graph.replay()
    graph.replay()
    assert weight.unique().tolist() == [-5.0]


def test_a_job_cannot_be_made_inside_a_graph() -> None:
    grad = torch.ones(10, device="cuda")
    sgd_job(grad)[1].step(Hyper(lr=1.0), Signals())
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="Make one step"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        sgd_job(grad)
    torch.cuda.synchronize()


def test_300_tensors_are_measured_and_updated_in_four_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    grads = [torch.randn(1000 + 37 * k, device="cuda") for k in range(300)]
    weights, means, squares = ([torch.zeros_like(grad) for grad in grads] for _ in range(3))
    steps = [torch.zeros((), device="cuda") for _ in grads]
    streams = Streams(weights=weights, grads=grads, states=(means, squares), steps=steps)
    job, norm_job = GpuJob("adam", 0, streams), SquaresJob(grads)
    launched = 0
    plain = launching.CupyLauncher.launch

    def count(self: Any, calls: Any, buffers: Any) -> None:
        nonlocal launched
        launched += len(calls)
        plain(self, calls, buffers)

    monkeypatch.setattr(launching.CupyLauncher, "launch", count)
    norm, _ = norm_job.measure()
    job.step(HYPER, Signals())
    assert launched == 4
    expected = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-12, atol=0)
    for weight, grad in zip(weights, grads):
        torch.testing.assert_close(weight, -3e-3 * grad / (grad.abs() + 1e-6), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_the_norm_finds_non_finite_elements(bad: float) -> None:
    grads = [
        torch.ones(70_000, device="cuda", dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ]
    assert grad_stats(grads)[1].item() == 0.0
    grads[1][-1] = bad
    assert grad_stats(grads)[1].item() == 1.0


def test_a_kernel_made_before_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ZOPTIM_CACHE", str(tmp_path))
    launching._load.cache_clear()
    weight, job = sgd_job(torch.ones(10, device="cuda"))
    job.step(Hyper(lr=1.0), Signals())
    files = sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir())
    assert len(files) == 2
    launching._load.cache_clear()
    weight, job = sgd_job(torch.ones(10, device="cuda"))
    job.step(Hyper(lr=1.0), Signals())
    assert files == sorted(path.stat().st_mtime_ns for path in tmp_path.iterdir())
    assert weight.unique().tolist() == [-1.0]
