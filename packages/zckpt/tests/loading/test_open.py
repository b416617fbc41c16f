import os
import shutil
from pathlib import Path

import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointNotFound, open_checkpoint, save, whole


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return save(tmp_path, "a", shards=[whole("w", torch.rand(40))], objects={})


FILE = "rank00000.safetensors"


@pytest.mark.parametrize("size", [0, 7, 100, "half", "-1", "+1"])
def test_a_file_of_another_size_is_told_with_both_sizes(path: Path, size: int | str) -> None:
    full = (path / FILE).stat().st_size
    found = {"half": full // 2, "-1": full - 1, "+1": full + 1}.get(str(size), size)
    os.truncate(path / FILE, int(found))
    why = "longer than when it was saved" if int(found) > full else "truncated"
    with pytest.raises(CheckpointCorrupt, match=f"{FILE} is {found:,} bytes, the manifest says {full:,}: {why}"):
        open_checkpoint(path)


def test_a_missing_file_and_a_link_in_its_place(path: Path) -> None:
    shutil.move(path / FILE, path / "moved")
    with pytest.raises(CheckpointCorrupt, match=f"{FILE} is missing"):
        open_checkpoint(path)
    (path / FILE).symlink_to("moved")
    with pytest.raises(CheckpointCorrupt, match=f"{FILE} is a link, not a plain file"):
        open_checkpoint(path)


def test_a_link_in_place_of_the_manifest(path: Path) -> None:
    shutil.move(path / "manifest.json", path / "moved")
    with pytest.raises(CheckpointNotFound, match=r"has no manifest.json: never committed"):
        open_checkpoint(path)
    (path / "manifest.json").symlink_to("moved")
    with pytest.raises(CheckpointCorrupt, match=r"manifest.json is a link"):
        open_checkpoint(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="the folder does not exist"):
        open_checkpoint(tmp_path / "none")


def test_a_file_of_another_save_is_named_as_such(path: Path) -> None:
    other = save(path.parent, "b", shards=[whole("w", torch.rand(50))], objects={})
    shutil.copy(other / FILE, path / FILE)
    with pytest.raises(CheckpointCorrupt, match=r"is of another save \(tag 'b', attempt [0-9a-f]{16}; this"):
        open_checkpoint(path)


def test_files_that_the_manifest_does_not_name_are_ignored(path: Path) -> None:
    (path / "rank00007.safetensors").write_text("")
    (path / "notes.txt").write_text("")
    open_checkpoint(path).verify()


def test_the_folder_one_stands_in(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path)
    assert open_checkpoint(".").tag == "a"
