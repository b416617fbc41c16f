"""The text of the GPU kernels, run on the CPU, gives the bits of the C kernels: every rule, every format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from zoptim.backends import native
from zoptim.backends.contract import Hyper
from zoptim.backends.cpu import CpuJob
from zoptim.backends.gpu import GpuJob
from zoptim.backends.signals import Signals

HYPER = Hyper(lr=3e-3, beta1=0.9, beta2=0.99, eps=1e-6, weight_decay=0.02, min_ratio=0.01, max_ratio=8.0)

# rule and flags: weight gradient state copy
CASES = [
    "adam: f32 f32 f32",
    "adam decoupled: f32 bf16 f32 bf16",
    "adam decoupled: f32 f16 f32 f16",
    "adam maximize no_correction: bf16 bf16 bf16",
    "adam decoupled: split bf16 f32",
    "adam decoupled: split f16 bf16 f16",
    "adam: f16 f16 f32",
    "adam: f32 bf16 f16",
    "adam decoupled: f32 bf16 q8 bf16",
    "adam: split bf16 q8",
    "adam amsgrad: f32 f32 f32",
    "adam amsgrad decoupled: bf16 f32 bf16",
    "adam amsgrad: f32 bf16 q8",
    "sgd: f32 f32 -",
    "sgd: bf16 bf16 -",
    "sgd: f32 f16 f32 f16",
    "sgd nesterov: split bf16 bf16",
    "sgd: f32 f32 q8",
    "adagrad: f32 f32 f32",
    "adagrad: bf16 bf16 q8",
    "adagrad: split f16 bf16",
    "lion decoupled: f32 f32 f32",
    "lion: f16 f16 f16",
    "lion: f32 bf16 bf16 bf16",
    "lion decoupled: split bf16 q8",
]
LAMB_CASES = [
    "lamb: f32 f32 f32",
    "lamb eps_inside: f32 bf16 f32 bf16",
    "lamb no_correction: split bf16 bf16",
    "lamb: f16 f16 q8",
    "lamb eps_inside: f32 f32 q8",
]

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C kernels to compare with")


def run(job_class: Callable[..., Any], case: Any, num_steps: int, **more: Any) -> Any:
    """Streams after some steps on fresh gradients, the last of which is skipped."""
    streams = case.streams()
    job = job_class(case.rule, case.flags, streams, **more)
    scale = torch.tensor(64.0)
    for step in range(num_steps + 1):
        for old, new in zip(streams.grads, case.streams(seed=step + 1).grads):
            old.copy_(new)
        found_inf = torch.tensor(float(step == num_steps))
        job.step(HYPER, Signals(scale, found_inf) if step else Signals())
    return streams


@pytest.mark.parametrize("name", CASES)
def test_the_gpu_text_gives_the_bits_of_the_c_kernels(
    name: str, shim: Any, make_case: Any, assert_same_bits: Any
) -> None:
    case = make_case(name)
    assert_same_bits(run(GpuJob, case, 3, launcher=shim), run(CpuJob, case, 3))


@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", ["adam: f32 bf16 f32 bf16", "adam amsgrad: split bf16 q8", "lion: f16 f32 bf16"])
def test_rows_may_begin_anywhere(name: str, offset: int, shim: Any, make_case: Any, assert_same_bits: Any) -> None:
    case = make_case(name, offset=offset, numels=(1, 130, 515, 1024))
    assert_same_bits(run(GpuJob, case, 2, launcher=shim), run(CpuJob, case, 2))


def test_rows_of_many_chunks_are_updated_alike(shim: Any, make_case: Any, assert_same_bits: Any) -> None:
    case = make_case("adam: f32 f32 q8", numels=(2 * 8192 + 1029, 3, 8192, 256))
    assert_same_bits(run(GpuJob, case, 2, launcher=shim), run(CpuJob, case, 2))


@pytest.mark.parametrize("more", [{}, {"offset": 1}, {"numels": (2 * 16384 + 1029, 3, 16384, 256)}])
@pytest.mark.parametrize("name", LAMB_CASES)
def test_both_halves_of_lamb_give_the_bits_of_the_c_kernels(
    name: str, more: dict[str, Any], shim: Any, make_case: Any, assert_same_bits: Any
) -> None:
    """The sums between them have another order: they agree to float32, and are then made equal."""
    case = make_case(name, **more)
    ours, theirs = case.streams(), case.streams()
    gpu, cpu = GpuJob(case.rule, case.flags, ours, launcher=shim), CpuJob(case.rule, case.flags, theirs)
    for step in range(2):
        for streams in (ours, theirs):
            for old, new in zip(streams.grads, case.streams(seed=step + 1).grads):
                old.copy_(new)
        sums, expected = gpu.sums(HYPER, Signals()), cpu.sums(HYPER, Signals())
        torch.testing.assert_close(sums, expected, rtol=1e-6, atol=0)
        sums.copy_(expected)
        gpu.apply()
        cpu.apply()
    assert_same_bits(ours, theirs)


def test_a_step_of_lamb_is_its_two_halves(shim: Any, make_case: Any, assert_same_bits: Any) -> None:
    case = make_case("lamb: f32 bf16 q8")
    whole, halves = case.streams(), case.streams()
    GpuJob(case.rule, case.flags, whole, launcher=shim).step(HYPER, Signals())
    job = GpuJob(case.rule, case.flags, halves, launcher=shim)
    job.sums(HYPER, Signals())
    job.apply()
    assert_same_bits(whole, halves)


def test_a_skipped_step_of_lamb_changes_nothing(shim: Any, make_case: Any, assert_same_bits: Any) -> None:
    case = make_case("lamb: split bf16 bf16")
    streams = case.streams()
    GpuJob(case.rule, case.flags, streams, launcher=shim).step(HYPER, Signals(None, torch.ones(())))
    assert_same_bits(streams, case.streams())


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same elements, one element off an aligned address."""
    return torch.cat([tensor[:1], tensor])[1:]


@pytest.mark.parametrize("which", ["weights", "grads", "remainders", "copies", "states"])
def test_one_stream_off_the_grid_is_enough_to_go_by_elements(which: str, shim: Any, make_case: Any) -> None:
    """A vector access to it would trap."""
    case = make_case("adam: split bf16 f32 f16", numels=(600,))
    aligned, awry = case.streams(), case.streams()
    if which == "states":
        awry = attrs.evolve(awry, states=(awry.states[0], [shifted(tensor) for tensor in awry.states[1]]))
    else:
        awry = attrs.evolve(awry, **{which: [shifted(tensor) for tensor in getattr(awry, which)]})
    for streams in (aligned, awry):
        GpuJob(case.rule, case.flags, streams, launcher=shim).step(HYPER, Signals())
    for one, other in zip(aligned.written(), awry.written()):
        assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("scale", [1.0, 0.0])
@pytest.mark.parametrize(
    "name", ["adam: f32 f32 q8", "adam: bf16 bf16 bf16", "sgd: f32 f32 bf16", "lion: bf16 f32 f32"]
)
def test_infinities_and_zeros_go_the_same_way(name: str, scale: float, shim: Any, make_case: Any) -> None:
    case, results = make_case(name, numels=(600,)), []
    for job_class, more in ((GpuJob, {"launcher": shim}), (CpuJob, {})):
        streams = case.streams()
        streams.grads[0][:300] = 0
        streams.grads[0][5], streams.grads[0][400] = float("inf"), float("nan")
        for states in streams.states:
            states[0][:256] = 0
        job_class(case.rule, case.flags, streams, **more).step(HYPER, Signals(torch.tensor(scale)))
        results.append([tensors[0].float() for tensors in streams.written()])
    torch.testing.assert_close(*results, rtol=0, atol=0, equal_nan=True)
    assert results[0][0].isnan().any()
