import errno
from pathlib import Path

import pytest

from zckpt.storage.storage import PathKind
from zckpt.testing import FaultyStorage, ModelStorage, fail_at


def test_the_operation_of_the_number_fails_once_and_does_not_happen() -> None:
    inner = ModelStorage()
    storage = FaultyStorage(inner, fail_at(1, errno.ENOSPC))
    storage.make_folder(Path("/a"))
    with pytest.raises(OSError, match="No space left") as caught:
        storage.make_folder(Path("/b"))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/b")
    assert inner.kind(Path("/b")) is PathKind.ABSENT
    storage.make_folder(Path("/b"))
    assert storage.names(Path("/")) == ["a", "b"]


def test_every_operation_of_the_protocol_passes_by() -> None:
    seen: list[str] = []
    storage = FaultyStorage(ModelStorage(), lambda operation, path: seen.append(operation))
    storage.make_folder(Path("/a"))
    with storage.create(Path("/a/f")) as writer:
        writer.write(memoryview(b"xy"))
        writer.sync()
    storage.sync_folder(Path("/a"))
    storage.rename(Path("/a/f"), Path("/a/g"))
    with storage.open(Path("/a/g")) as reader:
        assert reader.nbytes == 2
        reader.read_into(0, memoryview(bytearray(2)))
    storage.kind(Path("/a/g"))
    storage.nbytes(Path("/a/g"))
    storage.names(Path("/a"))
    storage.free_bytes(Path("/a"))
    storage.lock(Path("/a/.lock"), "me").release()
    storage.remove(Path("/a/g"))
    assert seen == [
        "make_folder", "create", "write", "sync", "sync_folder", "rename", "open", "read_into",
        "kind", "nbytes", "names", "free_bytes", "lock", "remove",
    ]  # fmt: skip
