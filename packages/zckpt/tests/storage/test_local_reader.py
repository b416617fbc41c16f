import os
from pathlib import Path

import pytest

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
