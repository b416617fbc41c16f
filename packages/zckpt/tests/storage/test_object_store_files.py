import contextlib
import errno
from pathlib import Path
from typing import Any

import pytest

from zckpt.storage.object_store_files import StoreReader, StoreWriter, as_os_errors
from zckpt.testing import ModelBucket

PATH = Path("model:/bucket/f")


def upload(bucket: ModelBucket) -> StoreWriter:
    return StoreWriter(PATH, bucket, "bucket/f", bucket.open("bucket/f", "wb"))


def test_an_object_is_there_when_sync_returns() -> None:
    bucket = ModelBucket()
    with upload(bucket) as writer:
        writer.write(memoryview(b"hello "))
        writer.write(memoryview(b"world"))
        with pytest.raises(FileNotFoundError):
            bucket.info("bucket/f")
        writer.sync()
    with StoreReader(PATH, bucket, "bucket/f", 11) as reader:
        part = bytearray(5)
        reader.read_into(6, memoryview(part))
        reader.read_into(11, memoryview(b""))
        with pytest.raises(OSError, match="file ends before byte 12"):
            reader.read_into(7, memoryview(part))
    assert part == b"world"


def test_what_fails_before_its_end_leaves_nothing() -> None:
    bucket = ModelBucket()
    with contextlib.suppress(ZeroDivisionError), upload(bucket) as writer:
        writer.write(memoryview(b"half"))
        writer.write(memoryview(bytes(1 // 0)))
    assert bucket._below("bucket") == set()


def test_without_sync_the_end_of_the_block_ends_the_object() -> None:
    bucket = ModelBucket()
    with upload(bucket) as writer:
        writer.write(memoryview(b"x"))
    assert bucket.cat_file("bucket/f") == b"x"


def test_a_handle_that_takes_less_is_given_the_rest() -> None:
    bucket = ModelBucket()

    class Slow:
        inner = bucket.open("bucket/f", "wb")

        def write(self, data: memoryview) -> int:
            return self.inner.write(data[:2])

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    with StoreWriter(PATH, bucket, "bucket/f", Slow()) as writer:
        writer.write(memoryview(b"hello"))
        writer.sync()
    assert bucket.cat_file("bucket/f") == b"hello"


@pytest.mark.parametrize(
    ("raised", "kind", "code"),
    [
        (FileNotFoundError("x"), FileNotFoundError, errno.ENOENT),
        (PermissionError("no"), PermissionError, errno.EACCES),
        (OSError(errno.ENOSPC, "full", "their spelling"), OSError, errno.ENOSPC),
        (RuntimeError("429"), OSError, errno.EIO),
    ],
)
def test_every_error_is_an_os_error_with_our_path(raised: Exception, kind: type[OSError], code: int) -> None:
    with pytest.raises(kind) as caught, as_os_errors(PATH):
        raise raised
    assert (caught.value.errno, caught.value.filename) == (code, str(PATH))


def test_an_interrupt_passes() -> None:
    with pytest.raises(KeyboardInterrupt), as_os_errors(PATH):
        raise KeyboardInterrupt
