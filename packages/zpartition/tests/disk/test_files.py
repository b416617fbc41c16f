from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch

from zpartition.disk import DiskFailed, DiskFull
from zpartition.disk.files import BlockFile, allows_direct, to_disk_error, translate_os_errors
from zpartition.disk.memory import BounceBuffer, MemorySpan, aligned_buffer
from zpartition.disk.system import System


def memory(num_bytes: int) -> MemorySpan:
    made = aligned_buffer(num_bytes)
    made[:] = torch.arange(made.numel()) % 251
    return MemorySpan.of(made, num_bytes)


@pytest.mark.parametrize(
    ("is_direct", "step"), [(False, 1), (False, 700), (False, 5000), (True, 4096), (True, 5000), (True, 9999)]
)
def test_short_reads_and_writes_are_resumed(tmp_path: Path, faulty_disk: Any, is_direct: bool, step: int) -> None:
    disk = faulty_disk()
    if is_direct and not allows_direct(disk, str(tmp_path / "probe")):
        pytest.skip("this file system refuses O_DIRECT")
    file = BlockFile.create(disk, str(tmp_path / "f"), 32768, is_direct=is_direct, bounce=BounceBuffer())
    source, into = memory(20_000), MemorySpan.of(torch.zeros(20_000, dtype=torch.uint8), 20_000)
    disk.cut, disk.block = lambda size: min(size, step), 4096 if is_direct else 1
    file.write(source, 4096)
    assert file.read(into, 4096) == 20_000
    assert bytes(into.bytes) == bytes(source.bytes)
    assert file.read(memory(4096), 32768) == 0, "behind the end"
    file.close()
    file.close()


def test_a_system_that_writes_nothing_is_an_error_and_no_endless_loop(tmp_path: Path, faulty_disk: Any) -> None:
    disk = faulty_disk()
    file = BlockFile.create(disk, str(tmp_path / "f"), 8192, is_direct=False, bounce=BounceBuffer())
    disk.cut = lambda size: 0
    with pytest.raises(OSError, match="wrote nothing"):
        file.write(memory(4096), 0)
    file.close()


def test_a_file_is_made_whole_or_not_at_all(tmp_path: Path, faulty_disk: Any, fail_once: Any) -> None:
    for fault in (fail_once("allocate", errno.ENOSPC), fail_once("open"), fail_once("open", number=1)):
        with pytest.raises(OSError):
            BlockFile.create(faulty_disk(fault), str(tmp_path / "f"), 8192, is_direct=False, bounce=BounceBuffer())
        assert not list(tmp_path.iterdir())
    (tmp_path / "f").write_text("somebody's")
    with pytest.raises(FileExistsError):
        BlockFile.create(System(), str(tmp_path / "f"), 8192, is_direct=False, bounce=BounceBuffer())
    assert (tmp_path / "f").read_text() == "somebody's"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_rejects_direct_calls_is_found_out(
    tmp_path: Path, faulty_disk: Any, fail_once: Any, code: int
) -> None:
    for fault in (fail_once("open", code, number=1), fail_once("write", code)):
        assert not allows_direct(faulty_disk(fault), str(tmp_path / "probe"))
    with pytest.raises(OSError, match="Input/output"):
        allows_direct(faulty_disk(fail_once("write", errno.EIO)), str(tmp_path / "probe"))
    assert not list(tmp_path.iterdir())


def test_errors_get_a_name_a_path_and_sizes(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    full = to_disk_error(System(), OSError(errno.ENOSPC, "x"), "write it", path, 77)
    assert isinstance(full, DiskFull)
    assert (full.path, full.needed_bytes, full.errno) == (path, 77, errno.ENOSPC)
    assert full.free_bytes > 0
    gone = to_disk_error(System(), OSError(errno.EDQUOT, "x"), "write it", "/not/there/f", 77)
    assert isinstance(gone, DiskFull)
    with (
        pytest.raises(DiskFailed, match=r"could not look \(9 bytes\): Input/output error \(errno 5\)"),
        translate_os_errors(System(), "look", path, 9),
    ):
        raise OSError("without a number")
