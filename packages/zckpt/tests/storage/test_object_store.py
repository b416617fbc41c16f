"""A save into a store without renames is cut at every operation, in every way a store may come back."""

import errno
import re
import uuid
import warnings
from pathlib import Path

import fsspec
import pytest
import torch

from zckpt import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointWarning,
    CheckpointWriteError,
    LockPolicy,
    Peers,
    find,
    list_checkpoints,
    open_checkpoint,
    remote,
    save,
    whole,
)
from zckpt.saving.commit import make_root, remove
from zckpt.storage.object_store import RemoteStorage
from zckpt.storage.storage import PathKind, Storage, read_all
from zckpt.testing import ModelBucket, Put, Torn, fail_put, run_threads

ROOT = Path("model:/bucket/run")


def save_step(bucket: ModelBucket, step: int, tag: str = "", world_size: int = 2, overwrite: bool = False) -> None:
    """A checkpoint whose every value is its step; each rank has a storage of its own, as a process would."""

    def rank(peers: Peers) -> None:
        shards = [whole("shared", torch.full((3,), float(step))), whole(f"own{peers.rank}", torch.full((5,), step))]
        objects = {"step": step}
        save(
            ROOT,
            tag or f"step-{step}",
            shards=shards,
            objects=objects,
            peers=peers,
            step=step,
            overwrite=overwrite,
            storage=bucket.storage(),
        )

    for outcome in run_threads(rank, world_size):
        if outcome.error is not None:
            raise outcome.error


def loaded(bucket: ModelBucket, tag: str | None = None) -> int:
    """The step that a fresh process would resume from, after reading and verifying everything."""
    found = find(ROOT, tag, storage=bucket.storage())
    found.verify()
    values = {float(value) for name in found.names() for value in found.tensor(name)}
    assert values == {float(found.step)} == {float(found.objects["step"])}
    return found.step


def crashes(bucket: ModelBucket, since: int) -> list[ModelBucket]:
    return [bucket.crash(at, torn) for at in range(since, len(bucket.journal) + 1) for torn in Torn]


@pytest.mark.parametrize("tag", ["", "only"])
def test_a_crash_anywhere_leaves_the_previous_checkpoint_or_the_new_one(tag: str) -> None:
    bucket = ModelBucket()
    save_step(bucket, 1, tag)
    acknowledged = len(bucket.journal)
    save_step(bucket, 2, tag, overwrite=bool(tag))
    for asked in {None, tag or None}:
        assert {loaded(after, asked) for after in crashes(bucket, acknowledged)} == {1, 2}
        assert {loaded(bucket.crash(len(bucket.journal), torn), asked) for torn in Torn} == {2}


def test_a_crash_during_the_very_first_save_leaves_nothing_or_it() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1)
    seen = set()
    for after in crashes(bucket, 0):
        try:
            seen.add(loaded(after))
        except CheckpointNotFound:
            seen.add(0)
    assert seen == {0, 1}


@pytest.mark.parametrize("overwrite", [False, True])
def test_after_any_crash_the_next_save_works_and_sweeps_and_may_crash_anywhere_too(overwrite: bool) -> None:
    """Objects of an attempt carry its name: after the third save none of an interrupted attempt is left."""
    bucket = ModelBucket()
    save_step(bucket, 1, "x", world_size=1)
    acknowledged = len(bucket.journal)
    save_step(bucket, 2, "x" if overwrite else "y", world_size=1, overwrite=overwrite)
    for at in range(acknowledged, len(bucket.journal) + 1, 5):
        after = bucket.crash(at, Torn.PART)
        before = loaded(after)
        save_step(after, 3, "z", world_size=1)
        storage = after.storage()
        assert [name for name in storage.names(ROOT) if name.startswith(".")] == []
        kept = {seen.path.name for seen in list_checkpoints(ROOT, storage=storage)}
        homes = {key.split("/")[2] for key in after.objects if "@" in key}
        assert {name.partition("@")[0] for name in homes} == kept
        assert len(homes) == len(kept)
        assert (loaded(after), loaded(after, "x") in (1, 2)) == (3, True)
        for again in crashes(after, 0)[::2]:
            assert loaded(again) in (before, 3)


def test_the_crash_model_would_notice_a_marker_that_comes_too_early() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1)
    acknowledged = len(bucket.journal)
    save_step(bucket, 2)
    ends = [i for i, put in enumerate(bucket.journal) if put.name == "end" and put.key.endswith("committed")]
    moved = bucket.journal[ends[-1] - 3 : ends[-1] + 1]
    early = [*bucket.journal[:acknowledged], *moved, *bucket.journal[acknowledged : ends[-1] - 3]]
    cut = ModelBucket(journal=early).crash(len(early) - 6, Torn.NOTHING)
    storage = cut.storage()
    assert storage.kind(ROOT / "step-2") is PathKind.FOLDER
    with pytest.raises(CheckpointNotFound, match="never committed"):
        find(ROOT, "step-2", storage=storage)


def raised_by(bucket: ModelBucket, tag: str, overwrite: bool) -> CheckpointWriteError | None:
    try:
        save_step(bucket, 2, tag, world_size=1, overwrite=overwrite)
    except CheckpointWriteError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_in_any_operation_is_a_named_error_and_leaves_what_was(code: int, overwrite: bool) -> None:
    outcomes, number = set(), 0
    while "done" not in outcomes:
        bucket = ModelBucket()
        save_step(bucket, 1, "x", world_size=1)
        count = len(bucket.journal)
        bucket.before = fail_put(number, code)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CheckpointWarning)  # what could not be tidied up
            error = raised_by(bucket, "x" if overwrite else "y", overwrite)
        if error is None:
            outcomes.add("saved")
            assert loaded(bucket) == 2
        else:
            outcomes.add("raised")
            assert re.search(rf"rank 0: .*{errno.errorcode[code]}", str(error))
            assert error.path.startswith(str(ROOT))
            assert loaded(bucket) in (1, 2)
        bucket.before = lambda put: None
        save_step(bucket, 3, world_size=1)
        assert loaded(bucket) == 3
        number += 1
        if number > len(bucket.journal) - count:
            outcomes.add("done")
    assert {"raised", "saved"} <= outcomes


def test_a_store_that_keeps_less_than_was_written_is_noticed_before_the_commit() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1, world_size=1)

    class Lossy(ModelBucket):
        def apply(self, put: Put) -> None:
            lost = put.name == "write" and put.key.endswith(".safetensors") and len(put.data) > 20
            super().apply(Put(put.name, put.key, put.data[:20]) if lost else put)

    lossy = Lossy({key: each.data or b"" for key, each in bucket.objects.items()})
    with pytest.raises(CheckpointWriteError, match=r"the store holds \d+ bytes of \d+ bytes written"):
        save_step(lossy, 2, world_size=1)
    assert loaded(lossy) == 1


def test_a_job_that_lost_its_lock_does_not_commit() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1, world_size=1)

    def steal(put: Put) -> None:
        if put.name == "begin" and put.key.endswith("manifest.json"):
            bucket.before = lambda put: None
            bucket.pipe_file("bucket/run/.lock", b"0123456789abcdef 0\nanother job\n")

    bucket.before = steal
    with pytest.raises(CheckpointWriteError, match=r"the lock was lost while saving; it is held by another job"):
        save_step(bucket, 2, world_size=1)
    assert loaded(bucket) == 1
    assert bucket.objects["bucket/run/.lock"].data.startswith(b"0123"), "the other's lock stays"  # type: ignore[union-attr]


def test_two_that_commit_one_tag_without_a_lock_leave_one_that_all_readers_see() -> None:
    bucket = ModelBucket()
    for step in (1, 2):
        save_step(bucket, step, "x", world_size=1)
        if step == 1:
            first = {key: each.data or b"" for key, each in bucket.objects.items()}
            bucket = ModelBucket()
    both = ModelBucket({**first, **{key: each.data or b"" for key, each in bucket.objects.items()}})
    names = both.storage().names(ROOT)
    assert [name.split("-")[0] for name in names] == [".old", "latest", "x"]
    assert loaded(both) in (1, 2)
    save_step(both, 3, world_size=1)
    assert both.storage().names(ROOT) == ["latest", "step-3", "x"]


def test_removal_makes_it_invisible_first() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1)
    before = len(bucket.journal)
    remove(bucket.storage(), ROOT / "step-1")
    removed = [put.key.rpartition("/")[2] for put in bucket.journal[before:]]
    assert removed == ["manifest.json", "rank00000.safetensors", "rank00001.safetensors", "committed"]
    assert bucket.storage().names(ROOT) == ["latest"]


def test_a_truncated_object_is_told() -> None:
    bucket = ModelBucket()
    save_step(bucket, 1, world_size=1)
    key = next(key for key in bucket.objects if key.endswith(".safetensors"))
    bucket.pipe_file(key, bucket.cat_file(key)[:-1])
    with pytest.raises(CheckpointCorrupt, match=r"rank00000.safetensors is \d+ bytes, the manifest says \d+: trunc"):
        find(ROOT, storage=bucket.storage())


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, RemoteStorage]:
    """A fresh root on real fsspec file systems."""
    url = f"memory://{uuid.uuid4().hex}/run" if request.param == "memory" else f"file://{tmp_path}/run"
    return url, remote(url)


def test_a_whole_life_on_fsspec(place: tuple[str, RemoteStorage]) -> None:
    url, storage = place
    for step, overwrite in ((1, False), (2, False), (2, True)):
        shards = [whole("w", torch.full((2, 3), float(step)))]
        folder = save(url, f"s{step}", shards=shards, objects={}, step=step, overwrite=overwrite, storage=storage)
        assert folder == Path(url.replace("://", ":/")) / f"s{step}"
    with pytest.raises(CheckpointExists):
        save(url, "s2", shards=shards, objects={}, storage=storage)
    found = find(url, storage=storage)
    found.verify()
    assert (found.tag, found.notes, found.tensor("w")[1, 2].item()) == ("s2", (), 2.0)
    assert [each.tag for each in list_checkpoints(url, storage=storage)] == ["s2", "s1"]
    assert open_checkpoint(found.path, storage=storage).step == 2
    assert storage.names(storage.root) == ["latest", "s1", "s2"]
    remove(storage, storage.root / "s1")
    assert storage.names(storage.root) == ["latest", "s2"]
    assert read_all(storage, storage.root / "latest", 10) == b"s2\n"


def test_a_url_is_enough() -> None:
    url = f"memory://{uuid.uuid4().hex}/run"
    folder = save(url, "a", shards=[whole("w", torch.ones(2))], objects={})
    for root in (url, str(folder.parent), folder.parent):
        assert find(root).tensor("w").tolist() == [1, 1]
    assert open_checkpoint(f"{url}/a").tag == "a"
    names = fsspec.filesystem("memory").find(url)
    assert sorted(re.sub(r".*/|@.*", "", name) for name in names) == [
        "committed",
        "latest",
        "manifest.json",
        "rank00000.safetensors",
    ]


def test_a_second_job_is_told_who_saves(place: tuple[str, RemoteStorage]) -> None:
    url, storage = place
    make_root(storage, storage.root)
    held = storage.lock(storage.root / ".lock", "pid 7 on elsewhere")

    class Beating:  # each look at the lock sees a new sign of life
        def __getattr__(self, name: str) -> object:
            if name == "cat_file":
                held.write_heartbeat(int(torch.randint(1 << 30, ()).item()))  # type: ignore[attr-defined]
            return getattr(storage.files, name)

    other = RemoteStorage(storage.root, storage.base, Beating(), storage.lock_policy)  # type: ignore[arg-type]
    with pytest.raises(CheckpointWriteError, match=r"another job is saving into .*: pid 7 on elsewhere"):
        save(url, "a", shards=[], objects={}, storage=other)
    held.release()
    save(url, "a", shards=[], objects={}, storage=storage)


def test_a_lock_that_is_half_written_is_one() -> None:
    bucket = ModelBucket()
    bucket.pipe_file("bucket/run/.lock", b"")
    looks: list[str] = []

    class Writing:  # another job: its sign is complete by the second look
        def __getattr__(self, name: str) -> object:
            if name == "cat_file" and (looks.append(name) or len(looks) == 2):
                bucket.pipe_file("bucket/run/.lock", b"0123456789abcdef 0\nanother job\n")
            return getattr(bucket, name)

    storage = RemoteStorage(ROOT, "bucket/run", Writing(), LockPolicy(heartbeat_s=60.0, timeout_s=0.5))  # type: ignore[arg-type]
    with pytest.raises(BlockingIOError, match="another job"):
        storage.lock(ROOT / ".lock", "me")


def test_operations_name_the_path_in_their_errors(place: tuple[str, RemoteStorage]) -> None:
    _, storage = place
    make_root(storage, storage.root)
    path = storage.root / "nothing"
    with pytest.raises(FileNotFoundError) as caught:
        storage.open(path)
    assert (caught.value.filename, caught.value.errno) == (str(path), errno.ENOENT)
    put(storage, path, b"abc")
    with pytest.raises(FileExistsError):
        storage.create(path)
    with storage.open(path) as reader, pytest.raises(OSError, match="file ends before byte 9") as released:
        reader.read_into(0, memoryview(bytearray(9)))
    assert released.value.filename == str(path)
    with pytest.raises(OSError, match="cannot be renamed"):
        save_and_rename(storage)


def save_and_rename(storage: RemoteStorage) -> None:
    folder = save(storage.root, "a", shards=[], objects={}, storage=storage)
    storage.rename(folder, storage.root / "b")


def put(storage: Storage, path: Path, data: bytes) -> None:
    with storage.create(path) as writer:
        writer.write(memoryview(data))
        writer.sync()


def test_nothing_above_the_root_is_asked_for_and_no_bucket_made() -> None:
    bucket, asked = ModelBucket(), []

    class Narrow:
        """Credentials that see only their own prefix."""

        def __getattr__(self, name: str) -> object:
            def call(path: str, *args: object, **options: object) -> object:
                asked.append(name)
                if not path.startswith("bucket/run"):
                    raise PermissionError(path)
                return getattr(bucket, name)(path, *args, **options)

            return call

    for scheme, makes in (("s3", False), ("model", True)):
        asked.clear()
        root = Path(f"{scheme}:/bucket/run/{scheme}")
        storage = RemoteStorage(root, f"bucket/run/{scheme}", Narrow(), LockPolicy(timeout_s=0.0))  # type: ignore[arg-type]
        save(root, "a", shards=[whole("w", torch.ones(2))], objects={}, storage=storage)
        assert find(root, storage=storage).tag == "a"
        assert ("makedirs" in asked) is makes


def test_whatever_a_store_raises_is_an_os_error() -> None:
    bucket = ModelBucket()

    def odd(put: Put) -> None:
        raise RuntimeError("429 slow down")

    bucket.before = odd
    with pytest.raises(CheckpointWriteError, match="RuntimeError: 429 slow down"):
        save_step(bucket, 1, world_size=1)
