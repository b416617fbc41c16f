import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zckpt import Shard, find, save
from zckpt.storage import local_files
from zckpt.storage.local_files import FrugalReader, PlainReader
from zckpt.storage.storage import LOCAL

_NBYTES = 300_001


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "f").write_bytes(os.urandom(_NBYTES))
    return tmp_path / "f"


@pytest.mark.parametrize(("offset", "nbytes"), [(0, _NBYTES), (1, 70_000), (299_000, 1001), (5, 10), (7, 0)])
def test_any_stretch_is_the_file_s_own_bytes(path: Path, offset: int, nbytes: int) -> None:
    part = bytearray(nbytes)
    with LOCAL.open(path) as reader:
        reader.read_into(offset, memoryview(part))
        assert reader.nbytes == _NBYTES
    assert part == path.read_bytes()[offset : offset + nbytes]


def test_a_short_read_is_continued(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:1000]], offset))
    part = bytearray(10_500)
    with LOCAL.open(path) as reader:
        reader.read_into(3, memoryview(part))
    assert part == path.read_bytes()[3:10_503]


def test_a_file_that_ends_too_soon_is_an_error(path: Path) -> None:
    with LOCAL.open(path) as reader:
        os.truncate(path, 100_000)
        with pytest.raises(OSError, match="file ends before byte"):
            reader.read_into(90_000, memoryview(bytearray(20_000)))


def test_a_system_without_the_hint_reads(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fadvise")
    part = bytearray(10)
    with LOCAL.open(path) as reader:
        reader.read_into(0, memoryview(part))
    assert part == path.read_bytes()[:10]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch, path: Path) -> Iterator[list[tuple[int, int]]]:
    """(offset, bytes) of every read with O_DIRECT; pages are expensive after 1000 bytes."""
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except (OSError, AttributeError):
        pytest.skip("this file system has no O_DIRECT")
    seen, real = [], os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            seen.append((offset, len(buffers[0])))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(local_files, "DIRECT_NBYTES", 1 << 16)
    monkeypatch.setattr(local_files, "TRIAL_NBYTES", 1000)
    monkeypatch.setattr(local_files, "_EXPENSIVE_S_PER_BYTE", 0.0)
    monkeypatch.setattr(local_files.time, "thread_time", iter(range(1000)).__next__)
    evict(path)
    return seen


def evict(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


def read_once(path: Path) -> bytes:
    """All of the file but its first 1000 bytes, which are read through the cache first."""
    part = bytearray(_NBYTES - 1000)
    with LOCAL.open(path, once=True) as reader:
        reader.read_into(0, memoryview(bytearray(1000)))
        path.read_bytes()  # ends reads ahead, which would keep their pages
        evict(path)
        reader.read_into(1000, memoryview(part))
        assert reader.nbytes == _NBYTES
    return bytes(part)


def test_where_pages_are_expensive_what_is_not_cached_is_read_past_the_cache(path: Path, direct: list) -> None:
    found = read_once(path)
    assert [offset for offset, _ in direct] == [at // 4096 * 4096 for at in range(1000, _NBYTES, 1 << 16)]
    assert all(nbytes % 4096 == 0 for _, nbytes in direct)
    direct.clear()
    expected = path.read_bytes()
    assert found == expected[1000:]
    with LOCAL.open(path, once=True) as reader:
        for _ in range(2):  # cached by now
            reader.read_into(0, memoryview(bytearray(_NBYTES)))
    assert direct == []


def test_where_pages_are_cheap_everything_goes_through_the_cache(
    path: Path, direct: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_files.time, "thread_time", lambda: 0.0)
    assert read_once(path) == path.read_bytes()[1000:]
    assert direct == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_rejects_is_read_plainly_and_a_disk_that_fails_is_an_error(
    path: Path, direct: list, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    if code == errno.EINVAL:
        assert read_once(path) == path.read_bytes()[1000:]
    else:
        with pytest.raises(OSError, match="f'") as caught:
            read_once(path)
        assert caught.value.errno == errno.EIO


def test_a_file_that_ends_too_soon_is_an_error_of_direct_reads_too(path: Path, direct: list) -> None:
    with LOCAL.open(path, once=True) as reader:
        reader.read_into(0, memoryview(bytearray(1000)))
        os.truncate(path, 100_000)
        with pytest.raises(OSError, match="file ends before byte"):
            reader.read_into(90_000, memoryview(bytearray(20_000)))


def test_a_name_that_is_another_file_by_now_is_read_as_it_was_opened(path: Path) -> None:
    plain = LOCAL.open(path)
    path.unlink()
    path.write_bytes(b"other")
    assert isinstance(plain, PlainReader)
    with FrugalReader.over(plain) as reader:
        assert reader is plain


def test_only_loads_that_read_each_byte_once_may_bypass_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[bool] = []
    real = FrugalReader.over
    monkeypatch.setattr(FrugalReader, "over", lambda plain: opened.append(True) or real(plain))
    values = torch.arange(10_000.0)
    save(tmp_path, "a", tensors={"w": values})
    for verify, expected in ((True, [True]), (False, [True]), ("first", [])):
        got = torch.zeros(10_000)
        opened.clear()
        find(tmp_path).read([Shard("w", (10_000,), ((0, 10_000),), (0, 10_000), got)], verify=verify)  # type: ignore[arg-type]
        assert torch.equal(got, values)
        assert opened == expected
