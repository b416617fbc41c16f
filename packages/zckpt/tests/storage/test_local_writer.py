import errno
import os
from pathlib import Path

import pytest

from zckpt.storage import local_files
from zckpt.storage.local_files import LocalWriter


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_files, "BUFFER_NBYTES", 8192)


@pytest.mark.parametrize("sizes", [[], [1], [8192], [8191, 2], [5, 30_000, 0, 8192, 7], [8192] * 3])
def test_bytes_arrive_in_order_however_they_come(tmp_path: Path, sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    with LocalWriter.create(tmp_path / "f") as writer:
        for part in parts:
            writer.write(memoryview(part))
        writer.sync()
        assert (tmp_path / "f").read_bytes() == b"".join(parts)  # nothing waits in the buffer after a sync
        writer.write(memoryview(b"more"))
    assert (tmp_path / "f").read_bytes() == b"".join(parts) + b"more"


def test_where_the_file_system_refuses_direct_writes_they_are_plain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, refused = os.write, []

    def write(fd: int, data: memoryview) -> int:
        if local_files.fcntl.fcntl(fd, local_files.fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(len(data))
            raise OSError(errno.EINVAL, "no direct writes")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    data = os.urandom(20_000)
    with LocalWriter.create(tmp_path / "f") as writer:
        writer.write(memoryview(data))
    assert (tmp_path / "f").read_bytes() == data
    assert refused in ([8192, 8192], [])  # [] where even the flag is refused


def test_an_error_has_the_path_and_nothing_is_written_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def write(fd: int, data: memoryview) -> int:
        calls.append(len(data))
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space") as caught, LocalWriter.create(tmp_path / "f") as writer:
        writer.write(memoryview(bytes(10_000)))
    assert caught.value.filename == str(tmp_path / "f")
    assert calls == [8192]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("mine")
    with pytest.raises(FileExistsError):
        LocalWriter.create(tmp_path / "f")
