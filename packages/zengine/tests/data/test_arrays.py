"""Arrays on disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from zengine.data.metrics import digest, open_array, save_array


def test_an_array_comes_back_mapped_and_numpy_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.npy"
    save_array(path, np.arange(6)[::2])
    assert open_array(path).tolist() == np.load(path).tolist() == [0, 2, 4]
    assert isinstance(open_array(path), np.memmap)
    assert [file.name for file in path.parent.iterdir()] == ["a.npy"]


def test_objects_are_neither_written_nor_read(tmp_path: Path) -> None:
    things = np.array([{}], dtype=object)
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        save_array(tmp_path / "a.npy", things)
    np.save(tmp_path / "b.npy", things)
    with pytest.raises(ValueError, match="Python objects"):
        open_array(tmp_path / "b.npy")


def test_a_digest_tells_arrays_apart() -> None:
    assert digest(np.arange(4)) == digest(np.arange(8)[:4]) != digest(np.array([0, 1, 3, 2]))
    assert digest(np.arange(8)[::2]) == digest(np.array([0, 2, 4, 6]))
