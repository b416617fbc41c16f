"""Reading Megatron's indexed datasets, from bytes written by hand."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from zengine.data import MetricIndex
from zengine.data.metrics import read_megatron_order, read_megatron_pair


def test_indexes_of_other_analyzers_are_read(tmp_path: Path) -> None:
    """Three metric values, of which the second has two samples."""
    write_megatron(tmp_path / "samples", [[4], [2, 1], [0, 3]], code=4)
    write_megatron(tmp_path / "values", [[10], [20], [30]], code=5)
    index = MetricIndex.load(tmp_path / "samples", tmp_path / "values.idx")
    assert index.samples.tolist() == [4, 1, 2, 0, 3]
    assert index.metrics.tolist() == [10, 20, 20, 30, 30]
    assert MetricIndex.load(tmp_path / "samples").metrics.tolist() == [0, 1, 2, 3, 4]
    assert read_megatron_order(tmp_path / "samples.bin").tolist() == [4, 1, 2, 0, 3]


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "samples", [[4], [2, 1]], code=4)
    write_megatron(tmp_path / "values", [[10], [20], [30]], code=5)
    with pytest.raises(ValueError, match=r"has 2 entries and .* 3 with 3 numbers"):
        read_megatron_pair(tmp_path / "samples", tmp_path / "values")
    with pytest.raises(ValueError, match=r"nowhere is neither a \.npy file nor a Megatron index"):
        read_megatron_order(tmp_path / "nowhere")
    (tmp_path / "samples.idx").write_bytes(b"x" * 40)
    with pytest.raises(ValueError, match=r"neither a \.npy file nor a Megatron index"):
        read_megatron_order(tmp_path / "samples")
    (tmp_path / "values.bin").write_bytes(bytes(16))
    with pytest.raises(ValueError, match=r"describes 3 numbers, but .*values\.bin has 2"):
        read_megatron_order(tmp_path / "values")


def write_megatron(stem: Path, entries: list[list[int]], code: int) -> None:
    """An indexed dataset: header, lengths (int32), offsets (int64), documents (int64); numbers beside it."""
    dtype = {4: "<i4", 5: "<i8"}[code]
    sizes = np.array([len(entry) for entry in entries], "<i4")
    offsets = (np.cumsum(sizes) - sizes).astype("<i8") * int(dtype[-1])
    documents = np.arange(len(entries) + 1, dtype="<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(entries), len(documents))
    stem.with_suffix(".idx").write_bytes(header + sizes.tobytes() + offsets.tobytes() + documents.tobytes())
    stem.with_suffix(".bin").write_bytes(np.array([number for entry in entries for number in entry], dtype).tobytes())
