import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt import CheckpointCorrupt, CheckpointInputError, CheckpointNotFound
from zckpt.interchange import import_weights, read_weights

TENSORS = {"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2, dtype=torch.bfloat16), "s": torch.tensor(3.0)}


def folder_of(path: Path, kind: str) -> Path:
    """The same weights in each supported format."""
    path.mkdir(exist_ok=True)
    if kind == "safetensors":
        save_file(TENSORS, path / "w.safetensors")
        return path / "w.safetensors"
    if kind == "pt":
        torch.save(TENSORS, path / "w.pt")
        return path / "w.pt"
    if kind == "nested pt":
        torch.save({"epoch": 3, "state_dict": TENSORS}, path / "w.pth")
        return path / "w.pth"
    if kind == "single":
        save_file(TENSORS, path / "model.safetensors")
    elif kind == "single bin":
        torch.save(TENSORS, path / "pytorch_model.bin")
    else:
        end, save = (".bin", torch.save) if kind == "indexed bin" else (".safetensors", save_file)
        table = {}
        for n, name in enumerate(TENSORS):
            table[name] = f"part-{n % 2}{end}"
        for file in sorted(set(table.values())):
            save({name: TENSORS[name] for name in table if table[name] == file}, path / file)  # type: ignore[operator]
        stem = "pytorch_model.bin" if kind == "indexed bin" else "model.safetensors"
        (path / f"{stem}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    return path


KINDS = ["safetensors", "pt", "nested pt", "single", "single bin", "indexed", "indexed bin"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_gives_slices_and_a_checkpoint(tmp_path: Path, kind: str) -> None:
    path = folder_of(tmp_path / "w", kind)
    with read_weights(path) as weights:
        assert set(weights) == set(TENSORS)
        assert len(weights) == 3
        assert weights["a"].get_shape() == [3, 4]
        assert weights["b"].get_dtype() == "bfloat16"
        assert torch.equal(weights["a"][1:2], TENSORS["a"][1:2])
        assert weights["s"][...].item() == 3.0
    import_weights(path, tmp_path / "ours", tag="start", prefix="model.")
    found = zckpt.find(tmp_path / "ours")
    assert found.tag == "start"
    assert all(torch.equal(found.tensor(f"model.{name}"), tensor) for name, tensor in TENSORS.items())
    assert found.objects["optimizer"] is None


def test_a_tied_weight_is_taken_once(tmp_path: Path) -> None:
    weight = torch.ones(3, 3)
    torch.save({"embed": weight, "head": weight, "part": weight[:1], "turned": weight.t()}, tmp_path / "w.pt")
    import_weights(tmp_path / "w.pt", tmp_path / "ours", prefix="")
    assert zckpt.find(tmp_path / "ours").names() == ("embed", "part", "turned")
    import_weights(tmp_path / "w.pt", tmp_path / "named")
    assert zckpt.find(tmp_path / "named").objects["tied"] == {"head": "embed"}


@pytest.mark.parametrize("written", ["first name alone", "each name"])
def test_a_tied_weight_of_safetensors_is_what_the_header_says(tmp_path: Path, written: str) -> None:
    tensors = {"embed": torch.ones(2), "head": torch.ones(2)} if written == "each name" else {"embed": torch.ones(2)}
    save_file(tensors, tmp_path / "w.safetensors", metadata={"format": "pt", "head": "embed", "other": "gone"})
    import_weights(tmp_path / "w.safetensors", tmp_path / "ours")
    found = zckpt.find(tmp_path / "ours")
    assert found.names() == ("model.embed",)
    assert found.objects["tied"] == {"head": "embed"}


@pytest.mark.parametrize(
    "file", ["../w.safetensors", "/etc/passwd", "..", "a/b.safetensors", ".hidden", "a\0b", "", 3, None, ["x"]]
)
def test_an_index_leads_to_files_of_its_folder_only(tmp_path: Path, file: Any) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(CheckpointCorrupt, match="not the plain name of a file beside it"):
        read_weights(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"weight_map": 3}', "{}", '{"weight_map": {"a": "x", "a": "y"}}', "\xff"]
)
def test_an_index_that_is_none_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointCorrupt, match=r"index\.json is not an index of weights"):
        read_weights(tmp_path)


def test_an_index_and_files_that_differ(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "w", "indexed")
    index = path / "model.safetensors.index.json"
    table = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {**table, "more": table["a"]}}))
    with pytest.raises(CheckpointCorrupt, match=r"1 names only in the index \(more\)"):
        read_weights(path)
    swapped = dict(zip(table, reversed([table["a"], table["b"], table["b"]])))
    index.write_text(json.dumps({"weight_map": swapped}))
    with pytest.raises(CheckpointCorrupt, match=r"is in part-.*, its index says part-.*: files of different exports"):
        read_weights(path)
    index.write_text(json.dumps({"weight_map": {name: file for name, file in table.items() if name != "s"}}))
    with pytest.raises(CheckpointCorrupt, match=r"1 only in the files \(s\)"):
        read_weights(path)


def test_a_shard_that_is_missing(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "w", "indexed")
    (path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"index\.json names 1 files that do not exist: part-1\.safetensors"):
        read_weights(path)


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def test_a_pickle_that_runs_something_is_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1), "b": Evil(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointCorrupt, match=r"names 'posix\.system'"):
        read_weights(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_what_holds_no_weights_is_named(tmp_path: Path) -> None:
    torch.save({"lr": 0.1}, tmp_path / "a.pt")
    with pytest.raises(CheckpointInputError, match="holds no state_dict"):
        read_weights(tmp_path / "a.pt")
    (tmp_path / "a.txt").touch()
    with pytest.raises(CheckpointInputError, match="weights are a"):
        read_weights(tmp_path / "a.txt")
    with pytest.raises(CheckpointNotFound, match="does not exist"):
        read_weights(tmp_path / "absent")
    with pytest.raises(CheckpointNotFound, match="has none of"):
        read_weights(tmp_path)
    (tmp_path / "b.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointCorrupt, match="not a valid safetensors file"):
        read_weights(tmp_path / "b.safetensors")
