import errno
import os
from pathlib import Path

import pytest

from zckpt.storage.storage import LOCAL, PathKind, Storage, read_all
from zckpt.testing import ModelStorage


@pytest.fixture(params=["local", "model"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Storage, Path]:
    """Each storage with an empty folder in it: the model must behave as the real one."""
    if request.param == "local":
        return LOCAL, tmp_path
    model = ModelStorage()
    model.make_folder(Path("/d"))
    return model, Path("/d")


def put(storage: Storage, path: Path, data: bytes) -> None:
    with storage.create(path) as writer:
        writer.write(memoryview(data))
        writer.sync()


def test_what_is_written_is_read(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    put(storage, folder / "f", b"hello world")
    assert (storage.kind(folder / "f"), storage.nbytes(folder / "f")) == (PathKind.FILE, 11)
    with storage.open(folder / "f") as reader:
        part = bytearray(5)
        reader.read_into(6, memoryview(part))
        assert (reader.nbytes, bytes(part)) == (11, b"world")
        with pytest.raises(OSError, match="file ends before"):
            reader.read_into(7, memoryview(part))
    assert read_all(storage, folder / "f", 11) == b"hello world"
    with pytest.raises(OSError, match="11 bytes, more than 10"):
        read_all(storage, folder / "f", 10)


def test_names_kinds_and_removal(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    storage.make_folder(folder / "b")
    put(storage, folder / "b" / "f", b"x")
    put(storage, folder / "a", b"y")
    storage.sync_folder(folder)
    assert storage.names(folder) == ["a", "b"]
    assert storage.kind(folder / "b") is PathKind.FOLDER
    assert storage.kind(folder / "c") is PathKind.ABSENT
    assert storage.kind(folder / "a" / "below a file") is PathKind.ABSENT
    with pytest.raises(OSError) as caught:
        storage.remove(folder / "b")
    assert caught.value.errno == errno.ENOTEMPTY
    storage.remove(folder / "b" / "f")
    storage.remove(folder / "b")
    assert storage.names(folder) == ["a"]


def test_create_refuses_a_name_that_exists(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    put(storage, folder / "f", b"old")
    with pytest.raises(FileExistsError) as caught:
        put(storage, folder / "f", b"new")
    assert caught.value.filename == str(folder / "f")
    assert read_all(storage, folder / "f", 10) == b"old"


def test_rename_replaces_a_file_and_no_full_folder(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    put(storage, folder / "new", b"new")
    put(storage, folder / "old", b"old")
    storage.rename(folder / "new", folder / "old")
    assert read_all(storage, folder / "old", 10) == b"new"
    for name in ("x", "y"):
        storage.make_folder(folder / name)
        put(storage, folder / name / "f", b"")
    with pytest.raises(OSError):
        storage.rename(folder / "x", folder / "y")
    with pytest.raises(FileNotFoundError):
        storage.rename(folder / "none", folder / "z")


def test_missing_things_are_named(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    for action in (storage.open, storage.names, storage.nbytes, storage.sync_folder, storage.remove):
        with pytest.raises(FileNotFoundError) as caught:
            action(folder / "none")  # type: ignore[operator]
        assert caught.value.filename == str(folder / "none")


def test_a_lock_has_one_holder_and_tells_the_second_who(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    lock = storage.lock(folder / ".lock", "pid 1 on here")
    assert lock.is_exclusive
    with pytest.raises(BlockingIOError, match="pid 1 on here"):
        storage.lock(folder / ".lock", "pid 2")
    lock.release()
    lock.release()
    storage.lock(folder / ".lock", "pid 2").release()


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        LOCAL.lock(tmp_path / ".lock", "the child")
        os._exit(0)
    os.waitpid(child, 0)
    LOCAL.lock(tmp_path / ".lock", "the parent").release()


def test_a_file_system_without_locks_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr("zckpt.storage.storage.fcntl.flock", no_locks)
    lock = LOCAL.lock(tmp_path / ".lock", "me")
    assert not lock.is_exclusive
    lock.release()


def test_links_and_devices_are_not_opened(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "link").symlink_to("f")
    os.mkfifo(tmp_path / "pipe")
    assert LOCAL.kind(tmp_path / "link") is PathKind.LINK
    assert LOCAL.kind(tmp_path / "pipe") is PathKind.OTHER
    for name in ("link", "pipe"):
        with pytest.raises(OSError):
            LOCAL.open(tmp_path / name)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, data[:3]))
    put(LOCAL, tmp_path / "f", b"hello world")
    assert (tmp_path / "f").read_bytes() == b"hello world"


def test_errors_on_a_descriptor_carry_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught:
        put(LOCAL, tmp_path / "f", b"x")
    assert caught.value.filename == str(tmp_path / "f")
    with pytest.raises(OSError) as caught:
        LOCAL.sync_folder(tmp_path)
    assert caught.value.filename == str(tmp_path)


def test_free_bytes_is_a_number(disk: tuple[Storage, Path]) -> None:
    storage, folder = disk
    assert storage.free_bytes(folder) > 0
