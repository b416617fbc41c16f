"""Megatron's indexed datasets: byte for byte those of DeepSpeed 0.19.8, and read back."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from zengine.data.metrics import MetricIndex
from zengine.deepspeed.runtime.data_pipeline.data_sampling import indexed_dataset as files

GOLDEN = json.loads((Path(__file__).parents[3] / "golden/deepspeed_0_19_8.json").read_text())["files"]
ENTRIES = ([1, 2, 3], [4], [5, 6])


def written(folder: Path, impl: str) -> str:
    builder = files.make_builder(f"{folder}/{impl}.bin", impl, vocab_size=100)
    for entry in ENTRIES:
        builder.add_item(torch.tensor(entry))
        builder.end_document()
    builder.finalize(f"{folder}/{impl}.idx")
    return f"{folder}/{impl}"


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_files_are_those_of_deepspeed(impl: str, tmp_path: Path) -> None:
    path = written(tmp_path, impl)
    index, numbers = (
        Path(each).read_bytes().hex() for each in (files.index_file_path(path), files.data_file_path(path))
    )
    assert [index, numbers, files.infer_dataset_impl(path)] == GOLDEN[impl]
    for how in ("infer", impl):
        dataset = files.make_dataset(path, how)
        copied = pickle.loads(pickle.dumps(dataset))
        assert [copied[place].tolist() for place in range(len(copied))] == list(map(list, ENTRIES))
        assert [entry.tolist() for entry in dataset[1:3]] == [[4], [5, 6]]
        with pytest.raises(IndexError, match="entry 3 of a dataset of 3"):
            dataset[3]
        with pytest.raises(ValueError, match="must be contiguous"):
            dataset[::2]


def test_parts_and_bounds_of_entries(tmp_path: Path) -> None:
    dataset = files.MMapIndexedDataset(written(tmp_path, "mmap"))
    assert dataset.get(0, offset=1).tolist() == [2, 3]
    assert dataset.get(0, offset=1, length=1).tolist() == [2]
    assert (dataset.dtype, dataset.sizes.tolist(), dataset.size(2)) == (np.uint16, [3, 1, 2], 2)
    assert dataset.doc_idx.tolist() == [0, 1, 2, 3]
    dataset.set_doc_idx(np.array([0, 3]))
    assert dataset.get_doc_idx().tolist() == [0, 3]
    cached = files.IndexedCachedDataset(written(tmp_path, "lazy"))
    assert cached.supports_prefetch
    cached.prefetch([0, 2])
    assert (cached[2].tolist(), cached[1].tolist(), cached.size(0)) == ([5, 6], [4], 3)


@pytest.mark.parametrize("impl", ["mmap", "lazy"])
def test_datasets_are_merged(impl: str, tmp_path: Path) -> None:
    path = written(tmp_path, impl)
    builder = files.make_builder(f"{tmp_path}/both.bin", impl, vocab_size=100)
    builder.add_item(torch.tensor([9, 9]))
    builder.end_document()
    builder.merge_file_(path)
    builder.finalize(f"{tmp_path}/both.idx")
    both = files.make_dataset(f"{tmp_path}/both", impl)
    assert [both[place].tolist() for place in range(4)] == [[9, 9], [1, 2, 3], [4], [5, 6]]
    assert both.doc_idx.tolist() == [0, 1, 2, 3, 4]
    other = files.MMapIndexedDatasetBuilder if impl == "mmap" else files.IndexedDatasetBuilder
    with pytest.raises(ValueError, match="holds"):
        other(f"{tmp_path}/other.bin", dtype=np.int64).merge_file_(path)


def test_codes_of_older_releases_are_told_by_the_size(tmp_path: Path) -> None:
    """Code 6 is float64 in DeepSpeed before 0.19 and in Megatron-LM, and uint16 since; our reader sees both."""
    for name, dtype in (("old", np.float64), ("new", np.uint16)):
        np.array([3, 5], dtype=dtype).tofile(tmp_path / f"{name}.bin")
        size = np.dtype(dtype).itemsize
        head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 6, 2, 1)
        tables = np.array([1, 1], np.int32).tobytes() + np.array([0, size], np.int64).tobytes() + bytes(8)
        (tmp_path / f"{name}.idx").write_bytes(head + tables)
        dataset = files.MMapIndexedDataset(f"{tmp_path}/{name}")
        assert (dataset.dtype, dataset[1].tolist()) == (dtype, [5])
        found = MetricIndex.load(tmp_path / name, tmp_path / name)
        assert found.metrics.tolist() == [3, 5]


def test_wrong_files_are_named(tmp_path: Path) -> None:
    path = written(tmp_path, "lazy")
    with pytest.raises(ValueError, match="this is a dataset of impl 'cached'"):
        files.MMapIndexedDataset(path)
    with pytest.raises(ValueError, match="impl must be one of lazy, cached, mmap or infer, got 'new'"):
        files.make_dataset(path, "new")
    assert files.make_dataset(f"{tmp_path}/none", "mmap") is None
    assert files.infer_dataset_impl(f"{tmp_path}/none") is None
    assert not files.dataset_exists(f"{tmp_path}/none", "mmap")
    with pytest.raises(ValueError, match="cannot be stored"):
        files.code(np.complex64)
    assert (files.code(torch.int64), files.code(np.dtype("uint16"))) == (5, 6)
    assert files.create_doc_idx([3, 0, 2, 0]) == [0, 2, 4]
    assert files.get_available_dataset_impl() == ["lazy", "cached", "mmap"]
    whole = written(tmp_path, "mmap")
    Path(f"{whole}.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="6 numbers do not match the 3 bytes"):
        files.MMapIndexedDataset(whole)
