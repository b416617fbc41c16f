from __future__ import annotations

import os
from pathlib import Path

import pytest

from zpartition.disk.system import NEW, System


def test_a_lock_is_held_against_the_same_process_and_says_by_whom(tmp_path: Path) -> None:
    system, path = System(), str(tmp_path / "lock")
    fd = system.lock(path, "process 7")
    with pytest.raises(BlockingIOError, match="process 7"):
        system.lock(path, "process 8")
    system.unlock(fd)
    fd = system.lock(path, "me")
    with pytest.raises(BlockingIOError, match="me"):
        system.lock(path, "process 8")
    system.unlock(fd)


def test_a_lock_on_a_file_that_was_removed_meanwhile_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening the file and locking it somebody removes it, and a third one makes a new one."""
    path, hold, removed = str(tmp_path / "lock"), System._hold, []

    def late(fd: int, name: str) -> None:
        if not removed:
            os.unlink(name)
            removed.append(name)
        hold(fd, name)

    monkeypatch.setattr(System, "_hold", staticmethod(late))
    fd = System().lock(path, "me")
    assert os.path.samestat(os.fstat(fd), os.stat(path))
    System().unlock(fd)


def test_calls_on_files_do_what_they_say(tmp_path: Path) -> None:
    system, path = System(), str(tmp_path / "a" / "f")
    system.make_folder(str(tmp_path / "a"))
    system.make_folder(str(tmp_path / "a"))
    fd = system.open(path, NEW)
    system.allocate(fd, 100)
    assert system.num_bytes(fd) == 100
    assert system.write(fd, memoryview(b"abc"), 5) == 3
    into = bytearray(4)
    assert system.read(fd, memoryview(into), 5) == 4
    assert into == b"abc\0"
    assert system.read(fd, memoryview(into), 100) == 0
    system.sync_data(fd)
    system.close(fd)
    assert system.free_bytes(str(tmp_path)) > 0
    system.rename(path, path + "2")
    system.sync_folder(str(tmp_path / "a"))
    assert system.names(str(tmp_path / "a")) == ["f2"]
    system.remove_folder(str(tmp_path / "a"))
    assert os.path.exists(path + "2"), "a folder with something in it stays"
    for _ in range(2):
        system.remove(path + "2")
        system.remove_folder(str(tmp_path / "a"))
    assert not os.path.exists(tmp_path / "a")
