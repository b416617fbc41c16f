import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zckpt import Shard, find, save
from zckpt.storage import local_files
from zckpt.storage.local_files import DirectReader, PlainReader
from zckpt.storage.storage import LOCAL

_NBYTES = 300_001


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "STEP_NBYTES", 1 << 16)
    monkeypatch.setattr(local_files, "LEAST_NBYTES", 1000)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(os.urandom(_NBYTES))
    evict(tmp_path / "f")
    return tmp_path / "f"


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """(offset, bytes) of every read with O_DIRECT."""
    seen, real = [], os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if local_files._O_DIRECT and fcntl.fcntl(fd, fcntl.F_GETFL) & local_files._O_DIRECT:
            seen.append((offset, len(buffers[0])))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def can_be_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "f", os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        return False
    return True


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, _NBYTES), (0, 4096), (1, 70_000), (4095, 140_000), (4096, 65_536), (299_000, 1001), (5, 10), (7, 0)],
)
def test_any_stretch_is_the_file_s_own_bytes(path: Path, offset: int, nbytes: int) -> None:
    expected, part = path.read_bytes()[offset : offset + nbytes], bytearray(nbytes)
    evict(path)
    with LOCAL.open(path, once=True) as reader:
        reader.read_into(offset, memoryview(part))
        assert reader.nbytes == _NBYTES
    assert part == expected


def test_what_is_not_cached_is_read_past_the_cache_and_what_is_comes_from_it(path: Path, direct: list) -> None:
    if not can_be_direct(path.parent):
        pytest.skip("this file system has no O_DIRECT")
    part = bytearray(_NBYTES)
    with LOCAL.open(path, once=True) as reader:
        reader.read_into(0, memoryview(part))
        assert [offset for offset, _ in direct] == [0, 1 << 16, 2 << 16, 3 << 16, 4 << 16]
        assert all(nbytes % 4096 == 0 for _, nbytes in direct)
        direct.clear()
        with LOCAL.open(path) as plain:
            plain.read_into(0, memoryview(bytearray(_NBYTES)))
        reader.read_into(0, memoryview(part))
    assert direct == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_refuses_is_read_plainly_and_a_disk_that_fails_is_an_error(
    path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    if not can_be_direct(path.parent):
        pytest.skip("this file system has no O_DIRECT")
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, flags)

    expected = path.read_bytes()
    evict(path)
    monkeypatch.setattr(os, "preadv", preadv)
    part = bytearray(_NBYTES)
    with LOCAL.open(path, once=True) as reader:
        if code == errno.EINVAL:
            reader.read_into(0, memoryview(part))
            assert part == expected
        else:
            with pytest.raises(OSError, match="f'") as caught:
                reader.read_into(0, memoryview(part))
            assert caught.value.errno == errno.EIO


def test_where_the_flag_is_refused_there_is_the_plain_reader(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(name: Path, flags: int, *rest: int) -> int:
        if flags & local_files._O_DIRECT:
            raise OSError(errno.EINVAL, "no direct reads", str(name))
        return real(name, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    with LOCAL.open(path, once=True) as reader:
        assert isinstance(reader, PlainReader)


def test_a_file_that_ends_too_soon_is_an_error(path: Path) -> None:
    with LOCAL.open(path, once=True) as reader:
        os.truncate(path, 100_000)
        with pytest.raises(OSError, match="file ends before byte"):
            reader.read_into(90_000, memoryview(bytearray(20_000)))


def test_a_name_that_is_another_file_by_now_is_read_as_it_was_opened(path: Path) -> None:
    plain = LOCAL.open(path)
    path.unlink()
    path.write_bytes(b"other")
    assert isinstance(plain, PlainReader)
    with DirectReader.over(plain) as reader:
        assert reader is plain


def test_loads_whose_ranks_want_different_bytes_are_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[bool] = []
    real = DirectReader.over
    monkeypatch.setattr(DirectReader, "over", lambda plain: opened.append(True) or real(plain))
    values = torch.arange(10_000.0)
    save(tmp_path, "a", tensors={"w": values})
    for verify, expected in ((True, [True]), (False, [True]), ("first", [])):
        got = torch.zeros(10_000)
        opened.clear()
        find(tmp_path).read([Shard("w", (10_000,), ((0, 10_000),), (0, 10_000), got)], verify=verify)  # type: ignore[arg-type]
        assert torch.equal(got, values)
        assert opened == expected
