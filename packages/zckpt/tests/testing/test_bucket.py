import pytest

from zckpt.testing import ModelBucket, Torn, fail_put


def test_an_object_is_seen_when_its_writing_has_ended() -> None:
    bucket = ModelBucket()
    upload = bucket.open("b/run/f", "wb")
    upload.write(memoryview(b"abcd"))
    with pytest.raises(FileNotFoundError):
        bucket.info("b/run/f")
    with pytest.raises(FileNotFoundError):
        bucket.ls("b/run")
    upload.close()
    assert (bucket.cat_file("b/run/f", 1, 3), bucket.info("b")["type"]) == (b"bc", "directory")
    assert [each["name"] for each in bucket.ls("b/run")] == ["b/run/f"]


def test_a_crash_keeps_what_had_ended_and_tears_the_rest_as_asked() -> None:
    bucket = ModelBucket({"old": b"before"})
    bucket.pipe_file("old", b"after!")
    bucket.rm_file("old")
    names = [put.name for put in bucket.journal]
    assert names == ["begin", "write", "write", "end", "remove"]
    left = [
        {torn: bucket.crash(at, torn).objects.get("old") for torn in Torn} for at in range(len(bucket.journal) + 1)
    ]
    data = [[each and each.data for each in row.values()] for row in left]
    assert data == [
        [b"before"] * 3,
        [b"before", b"", b""],
        [b"before", b"aft", b""],
        [b"before", b"after!", b""],
        [b"after!"] * 3,
        [None] * 3,
    ]


def test_a_change_can_be_made_to_fail_and_then_has_not_happened() -> None:
    bucket = ModelBucket(before=fail_put(3))
    with pytest.raises(OSError, match="Input/output error"):
        bucket.pipe_file("a", b"x")
    assert [put.name for put in bucket.journal] == ["begin", "write", "write"]
    bucket.pipe_file("b", b"y")
    assert bucket.cat_file("b") == b"y"
