"""What get_accelerator() answers, on a CPU; and that every answer has the name and the kind of the GPU's."""

from __future__ import annotations

import inspect

import pytest
import torch

from zengine.deepspeed.accelerator import CpuAccelerator, CudaAccelerator, get_accelerator


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    get_accelerator.cache_clear()
    yield monkeypatch
    get_accelerator.cache_clear()


def test_the_environment_may_choose(fresh: pytest.MonkeyPatch):
    fresh.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(get_accelerator(), CpuAccelerator)
    assert get_accelerator() is get_accelerator()
    get_accelerator.cache_clear()
    fresh.setenv("DS_ACCELERATOR", "tpu")
    with pytest.raises(ValueError, match="DS_ACCELERATOR='tpu': zengine runs on cpu and cuda"):
        get_accelerator()


def test_memory_is_the_process_s_own():
    cpu = CpuAccelerator()
    assert 1 << 20 < cpu.memory_allocated() <= cpu.max_memory_allocated() + (1 << 20)
    assert cpu.available_memory() <= cpu.total_memory()


def test_streams_and_seeds_are_torchs():
    cpu = CpuAccelerator()
    cpu.manual_seed(11)
    assert cpu.initial_seed() == 11
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    with cpu.stream(cpu.current_stream()):
        cpu.synchronize()
        cpu.empty_cache()
    tensor = torch.ones(1)
    assert cpu.on_accelerator(tensor)
    assert cpu.pin_memory(tensor) is tensor
    assert not cpu.is_pinned(tensor)


def test_its_names_are_those_of_the_device():
    cpu = CpuAccelerator()
    assert (cpu.device_name(3), cpu.current_device_name(), cpu.communication_backend_name()) == ("cpu", "cpu", "gloo")
    assert torch.device(cpu.device_name()) == torch.ones(1).device
    assert torch.bfloat16 in cpu.supported_dtypes()


def test_the_two_accelerators_answer_the_same_questions():
    gpu = CudaAccelerator()
    questions = [name for name, _ in inspect.getmembers(CpuAccelerator, inspect.isfunction)]
    assert len(questions) > 30
    assert not [name for name in questions if not callable(getattr(gpu, name, None))]
