from __future__ import annotations

import gc
import threading

import pytest
import torch

from zpartition.disk.memory import BounceBuffer, MemorySpan, aligned_buffer, padded


@pytest.mark.parametrize("size", [0, 1, 4096, 4097])
def test_aligned_memory_is_made_of_whole_pages(size: int) -> None:
    tensor = aligned_buffer(size)
    assert tensor.numel() == padded(size) >= size
    assert padded(size) % 4096 == tensor.data_ptr() % 4096 == 0
    assert not tensor.any()
    assert MemorySpan.of(tensor, padded(size)).is_aligned


def test_a_memory_is_the_tensors_and_keeps_it() -> None:
    tensor = torch.arange(8, dtype=torch.int32)
    memory = MemorySpan.of(tensor[2:], 24)
    memory.cut(4, 8).bytes[:] = (77).to_bytes(4, "little")
    assert tensor.tolist() == [0, 1, 2, 77, 4, 5, 6, 7]
    del tensor
    gc.collect()
    assert bytes(memory.bytes[4:8]) == (77).to_bytes(4, "little")
    assert not memory.cut(4, 8).is_aligned


def test_every_thread_has_a_bounce_buffer_of_its_own_that_grows() -> None:
    bounce, others = BounceBuffer(), []
    first = bounce.get(5000)
    assert len(first.bytes) == 8192
    assert bounce.get(100).address == first.address
    assert len(bounce.get(9000).bytes) == 12288
    here = bounce.get(1).address
    thread = threading.Thread(target=lambda: others.append(bounce.get(1).address))
    thread.start()
    thread.join()
    assert others != [here]
