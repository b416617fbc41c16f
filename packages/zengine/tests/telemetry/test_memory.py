"""Memory of the process and of the device."""

import resource

import pytest
import torch

from zengine.telemetry import memory
from zengine.telemetry.memory import MemoryMarks, NoMemoryMarks, current_bytes, process_memory, read_memory

CPU = torch.device("cpu")
MIB = 2**20


def test_a_large_allocation_shows_in_the_process_and_then_only_in_its_peak():
    before = process_memory()
    block = torch.ones(64 * MIB, dtype=torch.uint8)
    during = process_memory()
    del block
    after = process_memory()
    assert during["process"] - before["process"] > 48 * MIB
    assert after["process"] < during["process"] - 48 * MIB
    assert after["process_peak"] >= during["process"] - MIB  # the kernel's counters lag a little


def test_both_files_tell_the_same_size():
    assert abs(current_bytes(CPU) - process_memory()["process"]) < 16 * MIB


def test_without_proc_the_peak_is_still_known(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "missing")
    monkeypatch.setattr(memory, "_SIZES", tmp_path / "missing")
    monkeypatch.setattr(memory.sys, "platform", "linux")
    peak = process_memory()
    assert set(peak) == {"process_peak"}
    assert peak["process_peak"] >= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - MIB
    assert current_bytes(CPU) == 0


def test_a_cpu_has_no_allocator_to_report():
    assert set(read_memory(CPU)) == {"process", "process_peak"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_cuda_allocator_is_reported():
    device = torch.device("cuda")
    block = torch.ones(8 * MIB, dtype=torch.uint8, device=device)
    read = read_memory(device)
    assert read["cuda_reserved"] >= read["cuda"] >= block.numel()
    assert read["cuda_peak"] >= read["cuda"] == current_bytes(device)


def test_marks_keep_the_memory_at_the_end_of_each_phase(monkeypatch):
    sizes = iter([10, 20, 30])
    monkeypatch.setattr(memory, "current_bytes", lambda device: next(sizes))
    marks = MemoryMarks(CPU)
    assert marks.observers() == (marks,)
    for phase in ("forward", "backward", "forward"):
        marks.phase_begin(phase)
        marks.phase_end(phase)
    assert marks.read() == {"after_forward": 30, "after_backward": 20}


def test_the_identity_marks_nothing():
    assert NoMemoryMarks().observers() == ()
    assert NoMemoryMarks().read() == {}
