import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import zckpt
from zckpt import (
    CheckpointCorrupt,
    CheckpointInputError,
    CheckpointMismatch,
    CheckpointWarning,
    CheckpointWriteError,
)
from zckpt.interchange import export_huggingface, huggingface, import_weights, read_weights
from zckpt.storage.storage import LocalStorage

TENSORS = {
    "model.embed.weight": torch.randn(50, 7, generator=torch.Generator().manual_seed(1)),
    "model.bias": torch.randn(5, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "model.count": torch.tensor(7),
    "model.none": torch.empty(0, 3),
    "optimizer.exp_avg.bias": torch.ones(5),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> zckpt.Checkpoint:
    zckpt.save(tmp_path / "run", "t", shards=[zckpt.whole(n, t) for n, t in TENSORS.items()], objects={})
    return zckpt.find(tmp_path / "run")


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_one_file_holds_the_weights_in_the_dtype_asked_for(tmp_path: Path, checkpoint: Any, dtype: Any) -> None:
    folder = export_huggingface(checkpoint, tmp_path / "out", dtype=dtype)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    found = load_file(folder / "model.safetensors")
    assert set(found) == {name.removeprefix("model.") for name in TENSORS if name.startswith("model.")}
    for name, tensor in found.items():
        source = TENSORS[f"model.{name}"]
        wanted = source.to(dtype) if dtype is not None and source.is_floating_point() else source
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)


def test_shards_have_an_index_and_keep_their_size(tmp_path: Path, checkpoint: Any) -> None:
    folder = export_huggingface(checkpoint, tmp_path / "a" / "out", max_shard_nbytes=24, prefix="")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == set(TENSORS)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    for file in files:
        with safe_open(folder / file, framework="pt") as opened:
            names = list(opened.keys())
            assert opened.metadata() == {"format": "pt"}
            assert all(index["weight_map"][name] == file for name in names)
        assert len(names) == 1 or sum(TENSORS[name].nbytes for name in names) <= 24
    with read_weights(folder) as weights:
        assert all(torch.equal(weights[name][...], tensor) for name, tensor in TENSORS.items())


def test_the_memory_of_an_export_does_not_depend_on_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory allocated while a tensor of 40 chunks is written: one chunk and its cast."""
    stretch = 1 << 12
    monkeypatch.setattr(huggingface, "_CHUNK_NUMEL", stretch)
    tensor = torch.arange(40 * stretch, dtype=torch.float32).view(40, stretch)
    zckpt.save(tmp_path / "run", "t", shards=[zckpt.whole("model.w", tensor)], objects={})
    written: list[int] = []
    real = huggingface.byte_view
    monkeypatch.setattr(huggingface, "byte_view", lambda part: written.append(part.nbytes) or real(part))
    made: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **keywords: Any) -> torch.Tensor:
        result = empty(*args, **keywords)
        made.append(result.nbytes)
        return result

    monkeypatch.setattr(huggingface.torch, "empty", counted)
    folder = export_huggingface(zckpt.find(tmp_path / "run"), tmp_path / "out", dtype=torch.bfloat16)
    assert written == [2 * stretch] * 40
    assert max(made) <= max(4 * stretch, 16 << 20)  # the reader's own window is bounded too
    assert torch.equal(load_file(folder / "model.safetensors")["w"], tensor.bfloat16())


def test_a_damaged_checkpoint_leaves_nothing(tmp_path: Path, checkpoint: Any) -> None:
    for file in checkpoint.path.glob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[-40] ^= 1
        file.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        export_huggingface(zckpt.find(tmp_path / "run"), tmp_path / "out", prefix="")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_arguments_that_cannot_be_meant(tmp_path: Path, checkpoint: Any) -> None:
    with pytest.raises(CheckpointInputError, match=r"must be torch\.float32, torch\.bfloat16"):
        export_huggingface(checkpoint, tmp_path / "out", dtype=torch.int8)
    with pytest.raises(CheckpointInputError, match="max_shard_nbytes must be at least 1, not 0"):
        export_huggingface(checkpoint, tmp_path / "out", max_shard_nbytes=0)
    with pytest.raises(CheckpointMismatch, match=r"no tensor whose name begins with 'net\.'"):
        export_huggingface(checkpoint, tmp_path / "out", prefix="net.")
    with pytest.raises(CheckpointInputError, match="exists"):
        export_huggingface(checkpoint, tmp_path / "run")
    (tmp_path / "empty").mkdir()
    assert export_huggingface(checkpoint, tmp_path / "empty").is_dir()


def test_a_disk_that_fails_leaves_nothing(tmp_path: Path, checkpoint: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(LocalStorage, "sync_folder", full)
    (tmp_path / "mine").mkdir()
    for target in ("out", "mine"):
        with pytest.raises(CheckpointWriteError, match="No space left"):
            export_huggingface(checkpoint, tmp_path / target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run"]


def test_what_float16_cannot_hold_is_told(tmp_path: Path) -> None:
    tensors = {"model.w": torch.tensor([1.0, 1e6]), "model.mask": torch.tensor([-math.inf, 1.0])}
    zckpt.save(tmp_path / "run", "t", shards=[zckpt.whole(n, t) for n, t in tensors.items()], objects={})
    with pytest.warns(CheckpointWarning, match="'w' holds values beyond float16") as told:
        export_huggingface(zckpt.find(tmp_path / "run"), tmp_path / "out", dtype=torch.float16)
    assert len(told) == 1
    export_huggingface(zckpt.find(tmp_path / "run"), tmp_path / "wide", dtype=torch.bfloat16)


def test_a_link_or_a_file_in_the_way_is_a_named_error(tmp_path: Path, checkpoint: Any) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(CheckpointInputError, match="link exists"):
        export_huggingface(checkpoint, tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointWriteError, match=r"export to .*file/out"):
        export_huggingface(checkpoint, tmp_path / "file" / "out")


def test_a_save_does_not_sweep_an_export_beside_it(tmp_path: Path, checkpoint: Any, monkeypatch: Any) -> None:
    real = huggingface.byte_view

    def saving(part: torch.Tensor) -> memoryview:
        zckpt.save(tmp_path / "run", "u", shards=[], objects={}, overwrite=True)
        return real(part)

    monkeypatch.setattr(huggingface, "byte_view", saving)
    folder = export_huggingface(checkpoint, tmp_path / "run" / "out")
    assert torch.equal(load_file(folder / "model.safetensors")["bias"], TENSORS["model.bias"])


def test_names_of_tied_weights_are_told_where_safetensors_looks_for_them(tmp_path: Path) -> None:
    model = Tied()
    zckpt.save(
        tmp_path / "run",
        "t",
        shards=[zckpt.whole("model.embed.weight", model.embed.weight.detach())],
        objects={"tied": {"head.weight": "embed.weight"}},
    )
    folder = export_huggingface(zckpt.find(tmp_path / "run"), tmp_path / "out")
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight"}
        assert list(opened.keys()) == ["embed.weight"]
    fresh = Tied()
    assert load_model(fresh, folder / "model.safetensors") == (set(), [])  # strict
    assert torch.equal(fresh.head.weight, model.embed.weight)
    import_weights(folder, tmp_path / "again")
    assert zckpt.find(tmp_path / "again").objects["tied"] == {"head.weight": "embed.weight"}


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
