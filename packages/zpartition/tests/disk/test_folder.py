from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zpartition.disk import DiskBusy, DiskCorrupt, DiskFailed
from zpartition.disk.folder import Folder
from zpartition.disk.journal import Journal
from zpartition.disk.system import System


@pytest.fixture
def held(tmp_path: Path) -> Any:
    folder = Folder.lock(System(), str(tmp_path))
    yield folder
    folder.unlock()


def test_a_journal_is_published_by_its_name(held: Folder) -> None:
    assert not held.has_journal()
    for generation in (1, 2):
        held.write_next(Journal(generation, 4096, ()), durable=True)
        held.publish_next(durable=True)
        assert held.read_journal().generation == generation
    Path(held.at("zpartition.journal")).write_bytes(b"something else")
    with pytest.raises(DiskCorrupt, match="a whole journal"):
        held.read_journal()


def test_a_journal_that_cannot_be_written_leaves_nothing(tmp_path: Path, faulty_disk: Any, fail_once: Any) -> None:
    for call in ("write", "sync_data"):
        folder = Folder.lock(faulty_disk(fail_once(call)), str(tmp_path))
        with pytest.raises((OSError, DiskFailed), match="Input/output"):
            folder.write_next(Journal(1, 4096, ()), durable=True)
        assert held_names(folder) == ["zpartition.lock"]
        folder.unlock()


def held_names(folder: Folder) -> list[str]:
    return folder.system.names(folder.path)


def test_only_our_files_are_swept_and_cleared(held: Folder, tmp_path: Path) -> None:
    ours = ["zpartition-00000.region", "zpartition-00007.region", "zpartition.journal.new"]
    others = ["zpartition-1.region", "a.region", "journal", "zpartition-00000.region.bak"]
    for name in [*ours, *others]:
        (tmp_path / name).write_text("")
    assert held.region_names() == ours[:2]
    assert held.new_region_name() == "zpartition-00008.region"
    held.sweep({"zpartition-00007.region"})
    assert held_names(held) == sorted([*others, ours[1], "zpartition.lock"])
    held.clear()
    assert held_names(held) == sorted(others)


def test_a_folder_has_one_holder(held: Folder) -> None:
    with pytest.raises(DiskBusy, match="use one folder for each rank"):
        Folder.lock(System(), held.path)
