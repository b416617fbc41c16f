"""Weight files written tensor by tensor, read by torch and safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

import zckpt.interchange
from zengine.checkpoint.weight_files import Entry, write_weights

TENSORS = {
    "a.weight": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)),
    "a.bias": torch.arange(5.0).to(torch.bfloat16),
    "half": torch.full((2, 1, 2), 0.5, dtype=torch.float16),
    "count": torch.tensor(7),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False]),
    "wide": torch.arange(300, dtype=torch.int64).view(3, 100)[:, ::2],
}


def entries() -> list[Entry]:
    return [Entry((name,), tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()]


def same(found: dict[str, torch.Tensor]) -> bool:
    return found.keys() == TENSORS.keys() and all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in TENSORS.items()
    )


def test_torch_loads_what_was_written_mapped_too_and_with_its_strict_reader(tmp_path: Path):
    path = tmp_path / "deep" / "pytorch_model.bin"
    write_weights(path, entries(), TENSORS.values())
    assert same(torch.load(path, weights_only=True))
    assert same(torch.load(path, weights_only=True, mmap=True))
    assert [each.name for each in path.parent.iterdir()] == ["pytorch_model.bin"]


def test_checksums_of_a_torch_file_are_those_of_its_bytes(tmp_path: Path):
    write_weights(tmp_path / "w.pt", entries(), TENSORS.values())
    with zckpt.interchange.read_weights(tmp_path / "w.pt") as weights:
        weights.verify()
        assert set(weights) == set(TENSORS)


def test_safetensors_loads_what_was_written(tmp_path: Path):
    write_weights(tmp_path / "w.safetensors", entries(), TENSORS.values())
    assert same(safetensors.torch.load_file(tmp_path / "w.safetensors"))


def test_tied_names_share_memory_in_a_torch_file_and_are_one_in_safetensors(tmp_path: Path):
    tied = [Entry(("embed", "head"), (2, 2), torch.float32)]
    write_weights(tmp_path / "w.bin", tied, [torch.ones(2, 2)])
    found = torch.load(tmp_path / "w.bin", weights_only=True)
    assert found["embed"].data_ptr() == found["head"].data_ptr()
    write_weights(tmp_path / "w.safetensors", tied, [torch.ones(2, 2)])
    assert list(safetensors.torch.load_file(tmp_path / "w.safetensors")) == ["embed"]


def test_values_are_taken_one_at_a_time(tmp_path: Path):
    alive: list[int] = []

    def values():
        for index in range(3):
            alive.append(index)
            yield torch.full((4,), float(index))

    write_weights(tmp_path / "w.bin", [Entry((str(i),), (4,), torch.float32) for i in range(3)], values())
    assert alive == [0, 1, 2]


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path):
    with pytest.raises(TypeError, match=r"z is torch\.complex64, which w\.bin cannot hold"):
        write_weights(tmp_path / "w.bin", [Entry(("z",), (1,), torch.complex64)], [torch.zeros(1)])
    with pytest.raises(ValueError, match=r"expected w as torch\.float32 \(2,\), got torch\.float32 \(3,\)"):
        write_weights(tmp_path / "w.bin", [Entry(("w",), (2,), torch.float32)], [torch.zeros(3)])
    assert list(tmp_path.iterdir()) == []
