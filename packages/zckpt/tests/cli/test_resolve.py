from pathlib import Path

import pytest
import torch

from zckpt import CheckpointInputError, CheckpointNotFound, save, whole
from zckpt.cli.resolve import existing_root, resolve
from zckpt.storage.storage import LOCAL

URL = "memory://zckpt-resolve/run"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, f"s{step}", shards=[whole("w", torch.ones(2))], objects={}, step=step)
    return tmp_path


def test_a_root_a_tag_in_it_or_the_folder_itself(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert resolve(str(root)).tag == "s2"
    assert (
        resolve(str(root), "s1").tag == resolve(str(root / "s1")).tag == resolve(str(root / "s1"), "s1").tag == "s1"
    )
    monkeypatch.chdir(root / "s1")
    assert (resolve(".").tag, resolve("..").tag) == ("s1", "s2")
    with pytest.raises(CheckpointInputError, match="leave out --tag"):
        resolve(str(root / "s1"), "s2")
    (root / "latest").unlink()
    assert resolve(str(root)).tag == "s2"
    assert "note: " in capsys.readouterr().err


def test_what_was_never_committed_or_is_not_there(root: Path) -> None:
    (root / "s2" / "manifest.json").unlink()
    with pytest.raises(CheckpointNotFound, match="never committed"):
        resolve(str(root / "s2"))
    with pytest.raises(CheckpointNotFound, match="is not a folder"):
        resolve(str(root / "s9"))
    with pytest.raises(CheckpointNotFound, match="is not a folder"):
        existing_root(str(root / "latest"))
    assert existing_root(str(root)) == (root.resolve(), LOCAL)
    (root / "s1").rename(
        root / ".tmp-s1-0123456789abcdef"
    )  # a deletion that was interrupted, or a save before its end
    with pytest.raises(CheckpointNotFound, match="never committed, or deleted"):
        resolve(str(root / ".tmp-s1-0123456789abcdef"))


def test_one_that_was_moved_aside_can_be_looked_at(root: Path) -> None:
    aside = root / ".old-s2-0123456789abcdef"
    (root / "s2").rename(aside)
    assert resolve(str(aside)).tag == "s2"


def test_urls_of_a_root_of_a_checkpoint_and_of_its_folder_in_the_store() -> None:
    import fsspec

    save(URL, "a", shards=[whole("w", torch.ones(2))], objects={}, overwrite=True)
    at = next(name for name in fsspec.filesystem("memory").ls("/zckpt-resolve/run", detail=False) if "@" in name)
    for text in (URL, f"{URL}/a", f"memory:/{at}"):
        assert resolve(text).tensor("w").tolist() == [1, 1]
    with pytest.raises(CheckpointNotFound, match="holds no committed checkpoint"):
        resolve("memory://zckpt-resolve/other")
