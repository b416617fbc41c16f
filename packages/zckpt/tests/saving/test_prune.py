"""Deletion under the same crash models as a save: of disks (test_commit.py) and of stores (test_object_store.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from zckpt import (
    AsyncSaver,
    CheckpointError,
    CheckpointWarning,
    CheckpointWriteError,
    Retention,
    find,
    list_checkpoints,
    prune,
    remote,
    save,
    whole,
)
from zckpt.saving.retention import RetentionPolicy
from zckpt.storage.storage import Storage
from zckpt.testing import SURVIVALS, FaultyStorage, ModelBucket, ModelStorage, Torn, fail_at

DISK, BUCKET = Path("/runs/a"), Path("model:/bucket/run")


def save_step(root: Path, storage: Storage, step: int, loss: float = 0.0, **options: object) -> None:
    shards = [whole("w", torch.full((4,), float(step)))]
    objects = {"metrics": {"loss": loss}}
    save(root, f"s{step}", shards=shards, objects=objects, step=step, storage=storage, **options)  # type: ignore[arg-type]


def tags(root: Path, storage: Storage) -> list[str]:
    """Checkpoints that load and verify; every committed one must."""
    found = list_checkpoints(root, storage=storage)
    for each in found:
        find(root, each.tag, storage=storage).verify()
    return [each.tag for each in found]


def test_what_no_rule_wants_goes_and_a_dry_run_only_tells() -> None:
    storage = ModelStorage()
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0), (5, 4.0)):
        save_step(DISK, storage, step, loss)
    keep = Retention(last=1, every=4, best=("loss", "min"))
    before = len(storage.journal)
    told = prune(DISK, keep, storage=storage, dry_run=True)
    assert (told.removed, told.damaged, len(storage.journal)) == (("s3", "s1"), (), before)
    assert tags(DISK, storage) == ["s5", "s4", "s3", "s2", "s1"]
    assert prune(DISK, keep, storage=storage) == told
    assert tags(DISK, storage) == ["s5", "s4", "s2"]
    assert storage.names(DISK) == ["latest", "s2", "s4", "s5"]
    assert storage.locks == {}


def test_after_each_save() -> None:
    storage = ModelStorage()
    for step in range(1, 6):
        save_step(DISK, storage, step, keep=Retention(last=2))
        assert tags(DISK, storage) == [f"s{step}", f"s{step - 1}"][:step]
    save_step(DISK, storage, 6, keep=Retention(last=1), latest=False)
    assert tags(DISK, storage) == ["s6", "s5"], "latest still names s5"


def test_a_save_does_not_delete_what_it_saved() -> None:
    storage = ModelStorage()
    for step in (5, 3):
        save_step(DISK, storage, step, keep=Retention(last=1), latest=step == 5)
    assert tags(DISK, storage) == ["s5", "s3"]
    save_step(DISK, storage, 4, keep=Retention(last=1), latest=False)
    assert tags(DISK, storage) == ["s5", "s4"]


def test_a_policy_that_raises_is_a_warning_of_a_save_that_has_succeeded() -> None:
    class Broken:
        def wants(self, found: object) -> dict[str, str]:
            raise KeyError("loss")

    storage = ModelStorage()
    with pytest.warns(CheckpointWarning, match="/runs/a: not pruned: KeyError: 'loss'"):
        save_step(DISK, storage, 1, keep=Broken())
    assert (tags(DISK, storage), storage.locks) == (["s1"], {})


def test_after_a_save_in_the_background() -> None:
    storage = ModelStorage()
    with AsyncSaver() as saver:
        for step in range(1, 4):
            shards = [whole("w", torch.full((4,), float(step)))]
            saver.save(DISK, f"s{step}", shards=shards, step=step, keep=Retention(last=2), storage=storage)
    assert tags(DISK, storage) == ["s3", "s2"]


def disk_crashes(keep: RetentionPolicy) -> Iterator[tuple[Path, Storage]]:
    storage = ModelStorage()
    for step in (1, 2, 3):
        save_step(DISK, storage, step)
    since = len(storage.journal)
    prune(DISK, keep, storage=storage)
    for at in range(since, len(storage.journal) + 1):
        for survival in SURVIVALS:
            yield DISK, storage.crash(at, survival)


def bucket_crashes(keep: RetentionPolicy) -> Iterator[tuple[Path, Storage]]:
    bucket = ModelBucket()
    for step in (1, 2, 3):
        save_step(BUCKET, bucket.storage(), step)
    since = len(bucket.journal)
    prune(BUCKET, keep, storage=bucket.storage())
    for at in range(since, len(bucket.journal) + 1):
        for torn in Torn:
            yield BUCKET, bucket.crash(at, torn).storage()


@pytest.mark.parametrize("crashes", [disk_crashes, bucket_crashes])
def test_a_crash_anywhere_leaves_whole_checkpoints_and_the_next_save_removes_the_rest(crashes) -> None:
    seen = set()
    for root, after in crashes(Retention(last=1)):
        left = tuple(tags(root, after))
        seen.add(left)
        assert find(root, storage=after).tag == "s3"
        assert set(left) <= {"s1", "s2", "s3"}
        for name in set(after.names(root)) - set(left):
            assert name.startswith(".") or name == "latest", "no half folder under a tag"
        save_step(root, after, 4)
        assert after.names(root) == ["latest", *sorted({*left, "s4"})]
    assert seen >= {("s3", "s2", "s1"), ("s3",)}
    assert len(seen) >= 3


def test_a_damaged_one_is_left_alone_and_does_not_count_among_the_last(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        shards = [whole("w", torch.ones(4))]
        save(tmp_path, f"s{step}", shards=shards, objects={}, step=step, latest=False)
    (tmp_path / "s3" / "rank00000.safetensors").unlink()
    (tmp_path / "mine").mkdir()
    pruned = prune(tmp_path, Retention(last=1))
    assert (pruned.removed, [line[:2] for line in pruned.damaged]) == (("s1",), ["s3"])
    assert "rank00000.safetensors is missing" in pruned.damaged[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "mine", "s2", "s3"]


def test_beside_a_save_nothing_is_deleted() -> None:
    storage = ModelStorage()
    for step in (1, 2):
        save_step(DISK, storage, step)
    lock = storage.lock(DISK / ".lock", "pid 7 on elsewhere")
    with pytest.raises(CheckpointWriteError, match="not pruned, another job is saving into it: pid 7 on elsewhere"):
        prune(DISK, Retention(), storage=storage)
    lock.release()
    assert tags(DISK, storage) == ["s2", "s1"]


def test_a_disk_that_refuses_is_an_error_of_prune_and_a_warning_of_save() -> None:
    storage = ModelStorage()
    for step in (1, 2):
        save_step(DISK, storage, step)
    with pytest.raises(CheckpointWriteError, match=r"/runs/a: not pruned: .*\(EIO\)"):
        prune(DISK, Retention(), storage=FaultyStorage(storage, fail_at(0, operations=frozenset({"rename"}))))
    assert tags(DISK, storage) == ["s2", "s1"]
    faulty = FaultyStorage(storage, fail_at(2, operations=frozenset({"rename"})))  # after the two of the save
    with pytest.warns(CheckpointWarning, match="not pruned"):
        save_step(DISK, faulty, 3, keep=Retention())
    assert tags(DISK, storage) == ["s3", "s2", "s1"]


def test_what_was_interrupted_is_put_right_before_it_is_judged() -> None:
    storage = ModelStorage()
    for step in (1, 2):
        save_step(DISK, storage, step)
    storage.rename(DISK / "s2", DISK / ".old-s2-0123456789abcdef")
    storage.make_folder(DISK / ".tmp-s9-0123456789abcdef")
    assert prune(DISK, Retention(), storage=storage).removed == ("s1",)
    assert storage.names(DISK) == ["latest", "s2"]


def test_a_url_will_do() -> None:
    url = "memory://zckpt-prune/run"
    for step in (1, 2):
        save(url, f"s{step}", shards=[whole("w", torch.ones(4))], objects={}, step=step)
    assert prune(url, Retention()).removed == ("s1",)
    assert remote(url).files.ls("/zckpt-prune/run", detail=False)[-1].startswith("/zckpt-prune/run/s2@")
    with pytest.raises(CheckpointError, match="s1"):
        find(url, "s1")
