import errno
import os
import shutil
from pathlib import Path

import pytest
import torch

from zckpt import (
    LOCAL,
    CheckpointCorrupt,
    CheckpointInputError,
    CheckpointNotFound,
    CheckpointReadError,
    Retention,
    find,
    list_checkpoints,
    save,
    whole,
)
from zckpt.loading.select import pending_pointer
from zckpt.testing import FaultyStorage


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """step-1, step-2 and step-3; `latest` names the last."""
    for step in (1, 2, 3):
        save(tmp_path, f"step-{step}", shards=[whole("w", torch.full((4,), float(step)))], objects={}, step=step)
    return tmp_path


def truncate(root: Path, tag: str) -> None:
    os.truncate(root / tag / "rank00000.safetensors", 5)


def test_latest_is_followed_without_a_word(root: Path) -> None:
    assert (find(root).tag, find(root).notes) == ("step-3", ())
    assert find(str(root)).step == 3


def test_a_tag_may_be_asked_for(root: Path) -> None:
    assert find(root, "step-1").tensor("w").tolist() == [1, 1, 1, 1]


def test_a_tag_that_is_not_there_offers_the_newest(root: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint 'step-9'. Newest complete checkpoint: step-3"):
        find(root, "step-9")
    with pytest.raises(CheckpointInputError, match="tag"):
        find(root, "../step-1")


@pytest.mark.parametrize("name", ["", "none", "file", "file/below"])
def test_a_root_without_checkpoints(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    for tag in (None, "a"):
        with pytest.raises(CheckpointNotFound, match=r"no committed checkpoint|There is no committed checkpoint"):
            find(tmp_path / name, tag)
    assert list_checkpoints(tmp_path / name) == []


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (None, "is missing"),
        (b"", "is empty"),
        (b" \n\n", "is empty"),
        (b"step-9\n", "names 'step-9', which is no committed checkpoint"),
        (b".tmp-step-9\n", "which is no committed checkpoint"),
        (b"two\nlines", "which is no committed checkpoint"),
        (b"\xff\xfe", "cannot be read"),
        (b"x" * 5000, "cannot be read"),
    ],
)
def test_a_bad_pointer_gives_the_newest_by_step_and_a_note(root: Path, content: bytes | None, note: str) -> None:
    (root / "latest").unlink()
    if content is not None:
        (root / "latest").write_bytes(content)
    found = find(root)
    assert found.tag == "step-3"
    assert note in found.notes[0]
    assert "taking the newest committed checkpoint" in found.notes[0]


def test_a_pointer_with_white_space_around_is_followed(root: Path) -> None:
    (root / "latest").write_text("  step-2 \r\n")
    assert find(root).tag == "step-2"


def test_a_pointer_to_an_older_one_is_followed_and_the_newer_is_offered(root: Path) -> None:
    """This is how a run is rolled back."""
    (root / "latest").write_text("step-1\n")
    found = find(root)
    assert found.tag == "step-1"
    assert found.notes == ("`latest` names 'step-1' (step 1); 'step-3' (step 3) is newer: load it with tag='step-3'",)


@pytest.mark.parametrize("content", ["../elsewhere", "/etc", "a/b", "..", "a\\b"])
def test_a_pointer_to_the_outside_is_refused(root: Path, content: str) -> None:
    shutil.copytree(root / "step-3", root.parent / "elsewhere", dirs_exist_ok=True)
    (root / "latest").write_text(content)
    with pytest.raises(CheckpointCorrupt, match=r"points outside its folder.*remove it. Newest.*: step-3"):
        find(root)
    shutil.rmtree(root.parent / "elsewhere")


def test_a_pointer_that_is_a_link_is_not_followed(root: Path) -> None:
    (root / "latest").unlink()
    (root / "latest").symlink_to("step-1")
    assert (find(root).tag, "is a link" in find(root).notes[0]) == ("step-3", True)


def test_a_tag_that_is_a_link_is_refused(root: Path) -> None:
    (root / "step-9").symlink_to(root / "step-1")
    with pytest.raises(CheckpointCorrupt, match="step-9 is a link, not a folder"):
        find(root, "step-9")
    (root / "latest").write_text("step-9\n")
    with pytest.raises(CheckpointCorrupt, match="step-9 is a link"):
        find(root)


def test_the_root_itself_may_be_a_link(root: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(root, target_is_directory=True)
    assert find(link).tag == "step-3"
    save(link, "step-4", shards=[], objects={}, step=4)
    assert find(root).tag == "step-4"


def test_damage_of_what_is_pointed_at_is_an_error_that_offers_the_newest_sound_one(root: Path) -> None:
    truncate(root, "step-3")
    words = r"step-3: rank00000.safetensors is 5 bytes, the manifest says [\d,]+: truncated.*"
    for tag in (None, "step-3"):
        with pytest.raises(CheckpointCorrupt, match=words + r"step-2 \(step 2; load it with tag='step-2'"):
            find(root, tag)
    truncate(root, "step-2")
    with pytest.raises(CheckpointCorrupt, match="Newest complete checkpoint: step-1"):
        find(root)
    truncate(root, "step-1")
    with pytest.raises(CheckpointCorrupt, match="There is no other complete checkpoint"):
        find(root)


def test_without_a_pointer_damaged_ones_are_passed_over_and_noted(root: Path) -> None:
    (root / "latest").unlink()
    truncate(root, "step-3")
    found = find(root)
    assert found.tag == "step-2"
    assert "skipped 'step-3' (step 3)" in found.notes[1]
    assert "truncated" in found.notes[1]


def test_order_is_by_step_and_not_by_time_or_name(tmp_path: Path) -> None:
    for tag, step in (("z", 7), ("b", 900), ("m", 80)):
        save(tmp_path, tag, shards=[], objects={}, step=step)
    (tmp_path / "latest").unlink()
    assert [seen.tag for seen in list_checkpoints(tmp_path)] == ["b", "m", "z"]
    assert find(tmp_path).tag == "b"


def test_folders_without_a_manifest_are_not_there(root: Path) -> None:
    for name in ("step-9", ".tmp-step-9-0123456789abcdef", "notes"):
        (root / name).mkdir()
    (root / "latest").unlink()
    assert find(root).tag == "step-3"
    with pytest.raises(CheckpointNotFound, match=r"has no manifest.json: never committed"):
        find(root, "step-9")


def test_a_renamed_checkpoint_is_not_taken_for_another(root: Path) -> None:
    (root / "step-3").rename(root / "step-7")
    with pytest.raises(CheckpointCorrupt, match="its manifest says tag 'step-3', expected 'step-7'"):
        find(root, "step-7")
    assert find(root).tag == "step-2"


def test_one_that_was_moved_aside_is_read_where_it_is(root: Path) -> None:
    (root / "step-3").rename(root / ".old-step-3-0123456789abcdef")
    found = find(root)
    assert found.tag == "step-3"
    assert "was being replaced when a save was interrupted: reading" in found.notes[0]
    assert found.tensor("w").tolist() == [3, 3, 3, 3]
    assert [seen.tag for seen in list_checkpoints(root)] == ["step-3", "step-2", "step-1"]
    assert sorted(each.name for each in root.iterdir())[0] == ".lock", "a reader moves nothing"


def test_a_commit_whose_pointer_was_not_set_yet_is_followed(root: Path) -> None:
    attempt = find(root, "step-2").manifest.attempt
    (root / f".latest-{attempt}").write_text("step-2\n")
    assert find(root).tag == "step-2"
    assert "is out of date: the save of 'step-2' was interrupted after its commit" in find(root).notes[0]
    save(root, "aside", shards=[], objects={}, latest=False)
    assert (root / "latest").read_text() == "step-2\n"
    assert not (root / f".latest-{attempt}").exists()


@pytest.mark.parametrize("content", [b"step-2\n", b"step-9\n", b"../x\n", b"\xff", b""])
def test_a_pointer_of_an_attempt_that_never_committed_counts_nothing(root: Path, content: bytes) -> None:
    (root / ".latest-0123456789abcdef").write_bytes(content)
    assert pending_pointer(LOCAL, root) is None
    assert find(root).tag == "step-3"


def test_a_disk_that_cannot_be_read_is_a_named_error(root: Path) -> None:
    def broken(operation: str, path: Path) -> None:
        if operation == "read_into" and path.name == "manifest.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    with pytest.raises(CheckpointReadError, match=r"manifest.json: Input/output error \(EIO\)"):
        find(root, "step-3", storage=FaultyStorage(LOCAL, broken))


def test_a_save_that_deletes_what_latest_named_while_somebody_looks(root: Path) -> None:
    """Between reading `latest` and opening the checkpoint that it names."""

    def saving(operation: str, path: Path) -> None:
        if (operation, path.name) == ("open", "latest") and not (root / "step-4").exists():
            stale.append((root / "latest").read_bytes())
            save(root, "step-4", shards=[whole("w", torch.ones(4))], step=4, keep=Retention(last=1))
            (root / "latest").write_bytes(stale[0])  # what was opened before the save replaced it
        elif (operation, path.name) == ("kind", "latest") and stale:
            (root / "latest").write_text("step-4\n")

    stale: list[bytes] = []
    found = find(root, storage=FaultyStorage(LOCAL, saving))
    assert (found.tag, stale) == ("step-4", [b"step-3\n"])


def test_nothing_there_says_what_is_not(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"it does not exist \(pass the folder that was passed to save"):
        find(tmp_path / "absent")
    with pytest.raises(CheckpointNotFound) as caught:
        find(tmp_path)
    assert str(caught.value) == f"{tmp_path} holds no committed checkpoint\n  {tmp_path / 'latest'} is missing"
