"""What scripts ask of their device, on a CPU; and what CUDA's accelerator answers without a GPU."""

from __future__ import annotations

import inspect
import os
from pathlib import Path

import pytest
import torch

import zengine.deepspeed.accelerator as accelerator
from zengine.deepspeed.accelerator import get_accelerator, is_current_accelerator_supported, set_accelerator
from zengine.deepspeed.accelerator import real_accelerator as real
from zengine.deepspeed.accelerator.abstract_accelerator import DeepSpeedAccelerator
from zengine.deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from zengine.deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(real, "ds_accelerator", None)
    return monkeypatch


def test_the_environment_may_choose(fresh: pytest.MonkeyPatch):
    fresh.setenv("DS_ACCELERATOR", "cpu")
    assert isinstance(get_accelerator(), CPU_Accelerator)
    assert get_accelerator() is get_accelerator()
    real.ds_accelerator = None
    fresh.setenv("DS_ACCELERATOR", "tpu")
    with pytest.raises(ValueError, match=r"DS_ACCELERATOR must be one of \['cuda', 'cpu'\]: 'tpu' is not supported"):
        get_accelerator()


def test_a_script_may_set_its_own(fresh: pytest.MonkeyPatch):
    class Mine(CPU_Accelerator):
        def device_name(self, device_index: int | None = None) -> str:
            return "mine"

    own = Mine()
    set_accelerator(own)
    assert get_accelerator() is own
    assert not is_current_accelerator_supported()
    with pytest.raises(AssertionError, match="int accelerator is not subclass of DeepSpeedAccelerator"):
        set_accelerator(3)  # type: ignore[arg-type]
    real.ds_accelerator = None
    assert is_current_accelerator_supported()


def test_each_module_has_one_accelerator_with_every_method():
    """As DeepSpeed's suite looks for them: every other file of the folder, by the ending of the class."""
    (folder,) = accelerator.__path__
    files = {path.name for path in Path(folder).glob("*.py")} - {"__init__.py"}
    assert files == {f"{kind}_accelerator.py" for kind in ("abstract", "real", "cpu", "cuda")}
    for kind in (CPU_Accelerator, CUDA_Accelerator):
        module = inspect.getmodule(kind)
        assert [name for name in dir(module) if name.endswith("_Accelerator")] == [kind.__name__]
        assert issubclass(kind, DeepSpeedAccelerator)
        assert not inspect.isabstract(kind)


def test_a_class_without_the_methods_cannot_be_made():
    class Empty(DeepSpeedAccelerator):
        pass

    with pytest.raises(TypeError, match="abstract method"):
        Empty()  # type: ignore[abstract]


def test_memory_is_the_process_s_own():
    cpu = CPU_Accelerator()
    assert 1 << 20 < cpu.memory_allocated() <= cpu.max_memory_allocated()
    assert cpu.available_memory() <= cpu.total_memory()
    before = cpu.memory_allocated()
    block = torch.ones(16 << 20)  # 64 MiB: never from the heap, whose memory this process may have
    assert cpu.memory_allocated() - before > 48 << 20
    del block
    assert cpu.memory_stats()["allocated_bytes.all.peak"] == cpu.max_memory_cached() >= before + (48 << 20)
    cpu.reset_max_memory_allocated()
    assert cpu.max_memory_reserved() < before + (48 << 20)


def test_streams_and_seeds_are_torchs():
    cpu = CPU_Accelerator()
    cpu.manual_seed(11)
    assert cpu.initial_seed() == 11
    assert cpu.default_generator(0).initial_seed() == 11
    state = cpu.get_rng_state()
    first = torch.rand(3)
    cpu.set_rng_state(state)
    assert torch.equal(cpu.random().get_rng_state(), state)
    assert torch.equal(torch.rand(3), first)
    with cpu.stream(cpu.current_stream()), cpu.capture_to_graph(cpu.create_graph()):
        cpu.synchronize()
        cpu.empty_cache()
    assert cpu.lazy_call(lambda: 5) == 5
    assert (cpu.Stream, cpu.Event, cpu.is_current_stream_capturing()) == (None, None, False)


def test_tensors_are_made_and_recognized():
    cpu = CPU_Accelerator()
    made = {
        kind: getattr(cpu, f"{kind}Tensor")([1, 2]) for kind in ("Float", "Half", "Int", "Long", "Byte", "Double")
    }
    assert [str(each.dtype) for each in made.values()] == [
        *("torch.float32", "torch.float16", "torch.int32", "torch.int64", "torch.uint8", "torch.float64")
    ]
    assert cpu.BFloat16Tensor([1]).dtype == torch.bfloat16
    tensor = made["Float"]
    assert cpu.on_accelerator(tensor)
    assert cpu.pin_memory(tensor) is tensor
    assert not cpu.is_pinned(tensor)
    assert cpu.pin_empty(2, 3, dtype=torch.int8).shape == cpu.pin_empty((2, 3), dtype=torch.int8).shape == (2, 3)
    assert cpu.pin_empty_like(tensor).dtype == torch.float32
    with pytest.raises(ValueError, match=r"pin_empty\(\) allocates host memory: pass device='cpu', not 'meta'"):
        cpu.pin_empty(2, dtype=torch.int8, device="meta")


def test_its_names_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch):
    cpu = CPU_Accelerator()
    assert (cpu.device_name(3), cpu.current_device_name(), cpu.communication_backend_name()) == ("cpu", "cpu", "gloo")
    assert torch.device(cpu.device_name()) == cpu.device(1) == torch.ones(1).device
    assert cpu.supported_dtypes()[:2] == [torch.float32, torch.bfloat16]
    assert (torch.float16 in cpu.supported_dtypes()) == cpu.is_fp16_supported()
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("LOCAL_SIZE", "4")
    assert (cpu.current_device(), cpu.device_count()) == (3, 4)
    monkeypatch.delenv("LOCAL_SIZE")
    assert 1 <= cpu.device_count() <= (os.cpu_count() or 1)
    assert cpu.use_host_timers()
    assert cpu.resolves_data_dependency()
    assert cpu.handles_memory_backpressure()
    environ: dict[str, str] = {}
    cpu.set_visible_devices_envs(environ, [1, 2])
    assert environ == {"CUDA_VISIBLE_DEVICES": "1,2"}


def test_builders_and_compilers_are_found_by_name():
    cpu = CPU_Accelerator()
    assert cpu.create_op_builder("CPUAdamBuilder").load().DeepSpeedCPUAdam
    assert cpu.get_op_builder("Nothing").NAME == "deepspeed_not_implemented"
    assert cpu.op_builder_dir().endswith("ops.op_builder")
    assert cpu.build_extension().__name__ == "BuildExtension"
    assert cpu.get_compile_backend() == "inductor"
    cpu.set_compile_backend("eager")
    assert cpu.get_compile_backend() == "eager"
    with pytest.raises(ValueError, match=r"magic not supported by cpu\. Supported Backends are"):
        cpu.set_compile_backend("magic")


def test_cuda_answers_what_needs_no_gpu():
    gpu = CUDA_Accelerator()
    assert (gpu.device_name(), gpu.device_name(2), gpu.device(1)) == ("cuda", "cuda:2", torch.device("cuda", 1))
    assert (gpu.communication_backend_name(), gpu.export_envs()) == ("nccl", ["NCCL"])
    assert (gpu.Stream, gpu.Event) == (torch.cuda.Stream, torch.cuda.Event)
    assert not gpu.on_accelerator(torch.ones(1))
    assert not gpu.use_host_timers()
    assert gpu.device_count() == torch.cuda.device_count()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_runs_on_a_gpu():
    gpu = CUDA_Accelerator()
    tensor = gpu.FloatTensor([1.0, 2.0])
    assert gpu.on_accelerator(tensor)
    assert gpu.memory_allocated() > 0
    assert gpu.pin_empty(4, dtype=torch.float32).is_pinned()
    assert gpu.total_memory() >= gpu.available_memory()
    graph = gpu.create_graph()
    gpu.synchronize()
    with gpu.capture_to_graph(graph):
        tensor += 1
    gpu.replay_graph(graph)
    gpu.range_push("here")
    gpu.range_pop()
    assert tensor.tolist() == [2.0, 3.0]
