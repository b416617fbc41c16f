"""Memory that two processes share."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

import zcomm
from zcomm.shared import native, segment
from zcomm.shared.segment import Offer, Segment
from zcomm.testing import run_ranks

pytestmark = pytest.mark.skipif(bool(native.unavailable_reason()), reason=native.unavailable_reason())


def num_mappings() -> int:
    """Segments of ours that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:zcomm")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_mapping_and_its_descriptor_end_with_their_last_use() -> None:
    before, ended = (num_mappings(), num_descriptors()), []
    made = Segment.create(native.library(), 10_000, lambda: ended.append(1))
    assert made.nbytes == 12_288
    other = made.offer().accept(native.library())
    other.buffer[100] = b"x"
    assert made.memory.buffer[100] == b"x"
    made.seal()
    made.seal()
    assert num_descriptors() == before[1]
    tensor = torch.frombuffer(made.memory.buffer, dtype=torch.uint8)
    assert tensor[:64].eq(0).all(), "the token is wiped"
    view = tensor[10:]
    del made, other, tensor
    gc.collect()
    assert num_mappings() == before[0] + 1
    assert not ended
    del view
    gc.collect()
    assert (num_mappings(), ended) == (before[0], [1])


def test_other_memory_under_the_same_number_is_rejected() -> None:
    made = Segment.create(native.library(), 4096)
    for wrong, reason in (({"token": "00" * 16}, "other memory here"), ({"nbytes": 8192}, "something else here")):
        with pytest.raises(OSError, match=reason):
            attrs.evolve(made.offer(), **wrong).accept(native.library())
    made.seal()
    with pytest.raises(OSError, match="No such file"):
        Offer(os.getpid(), 10_000, "", 4096).accept(native.library())


def test_memory_that_cannot_be_had_is_an_error_at_once_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scarce = tmp_path / "meminfo"
    scarce.write_text("MemTotal: 900 kB\nMemAvailable: 7 kB\n")
    monkeypatch.setattr(segment, "_MEMORY", scarce)
    before = num_descriptors()
    with pytest.raises(OSError, match="8192 bytes of shared memory are needed, 7168 are available"):
        Segment.create(native.library(), 8000)
    monkeypatch.undo()
    monkeypatch.setattr(segment.os, "posix_fallocate", reject)
    with pytest.raises(OSError, match="no room"):
        Segment.create(native.library(), 8000)
    assert num_descriptors() == before


def reject(*_: int) -> None:
    raise OSError("no room")


def rank_reads_the_other() -> list[int]:
    library, rank = native.library(), zcomm.group_rank()
    segment = Segment.create(library, 4096)
    offers: list[Any] = zcomm.all_gather_object(attrs.asdict(segment.offer()))
    theirs = Offer(**offers[1 - rank]).accept(library)
    segment.memory.buffer[1000] = bytes([rank + 1])
    zcomm.barrier()
    segment.seal()
    return list(theirs.buffer[1000])


def test_two_processes_see_the_same_memory() -> None:
    assert run_ranks(rank_reads_the_other, 2) == [[2], [1]]
