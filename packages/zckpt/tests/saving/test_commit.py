"""The crash model: interrupt a save at every operation, in every state a disk may restart in; something must load.

Also make every operation fail once; the mutations show that these tests notice a missing sync.
"""

import errno
import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from zckpt import (
    CheckpointError,
    CheckpointInputError,
    CheckpointNotFound,
    CheckpointWarning,
    CheckpointWriteError,
    Peers,
    find,
    save,
    whole,
)
from zckpt.format import manifest as manifests
from zckpt.saving.commit import make_root, remove, sweep
from zckpt.storage.storage import Storage, read_all
from zckpt.testing import SURVIVALS, FaultyStorage, ModelStorage, fail_at, run_threads
from zckpt.testing.faults import WRITING
from zckpt.testing.model import KILLED

ROOT = Path("/runs/a")


def save_step(storage: Storage, step: int, tag: str = "", world_size: int = 2, **options: object) -> None:
    """A checkpoint whose every value is its step, saved by ranks that share one tensor and own one each."""

    def rank(peers: Peers) -> None:
        shards = [whole("shared", torch.full((3,), float(step))), whole(f"own{peers.rank}", torch.full((5,), step))]
        save(
            ROOT,
            tag or f"step-{step}",
            shards=shards,
            objects={"step": step},
            peers=peers,
            step=step,
            storage=storage,
            **options,  # type: ignore[arg-type]
        )

    for outcome in run_threads(rank, world_size):
        if outcome.error is not None:
            raise outcome.error


def loaded(storage: Storage, tag: str | None = None) -> int:
    """The step that a fresh process would resume from, after reading and verifying everything."""
    found = find(ROOT, tag, storage=storage)
    found.verify()
    values = {float(value) for name in found.names() for value in found.tensor(name)}
    assert values == {float(found.step)} == {float(found.objects["step"])}
    return found.step


def crashes(storage: ModelStorage, since: int) -> list[ModelStorage]:
    points = range(since, len(storage.journal) + 1)
    return [storage.crash(at, survival) for at in points for survival in SURVIVALS]


def test_a_crash_anywhere_leaves_the_previous_checkpoint_or_the_new_one() -> None:
    storage = ModelStorage()
    save_step(storage, 1)
    acknowledged = len(storage.journal)
    save_step(storage, 2)
    assert {loaded(after) for after in crashes(storage, acknowledged)} == {1, 2}
    assert {loaded(storage.crash(len(storage.journal), survival)) for survival in SURVIVALS} == {2}


def test_a_crash_during_the_very_first_save_leaves_nothing_or_it() -> None:
    storage = ModelStorage()
    save_step(storage, 1)
    seen = set()
    for after in crashes(storage, 0):
        try:
            seen.add(loaded(after))
        except CheckpointNotFound:
            seen.add(0)
    assert seen == {0, 1}


def test_without_latest_a_checkpoint_is_durable_too_and_latest_itself_is_when_it_is_set() -> None:
    storage = ModelStorage()
    save_step(storage, 1)
    first = len(storage.journal)
    save_step(storage, 2, latest=False)
    for survival in SURVIVALS:
        assert read_all(storage.crash(first, survival), ROOT / "latest", 100) == b"step-1\n"
        after = storage.crash(len(storage.journal), survival)
        assert (loaded(after), loaded(after, "step-2")) == (1, 2)


def test_a_crash_while_a_tag_is_replaced_leaves_its_old_or_its_new_content() -> None:
    storage = ModelStorage()
    save_step(storage, 1, "only")
    acknowledged = len(storage.journal)
    save_step(storage, 2, "only", overwrite=True)
    for tag in (None, "only"):
        assert {loaded(after, tag) for after in crashes(storage, acknowledged)} == {1, 2}
        assert {loaded(storage.crash(len(storage.journal), survival), tag) for survival in SURVIVALS} == {2}


@pytest.mark.parametrize("overwrite", [False, True])
def test_after_any_crash_the_next_save_works_and_sweeps_and_may_crash_anywhere_too(overwrite: bool) -> None:
    """Crashes during the recovery from a crash; a sample of the first, each point of the second.

    After a kill, 2 may be visible and not durable; a power cut may then bring back 1, which was acknowledged.
    """
    storage = ModelStorage()
    save_step(storage, 1, "x", world_size=1)
    acknowledged = len(storage.journal)
    save_step(storage, 2, "x" if overwrite else "y", world_size=1, overwrite=overwrite)
    for at in range(acknowledged, len(storage.journal) + 1, 3):
        for survival in (SURVIVALS[0], KILLED):
            after = storage.crash(at, survival)
            before = loaded(after)
            save_step(after, 3, "z", world_size=1)
            names = after.names(ROOT)
            assert [name for name in names if name.startswith(".")] == []
            assert loaded(after) == 3
            assert loaded(after, "x") in (1, 2)
            for again in crashes(after, 0):
                assert loaded(again) in (1, before, 3)


class Forgetful(ModelStorage):
    """A disk whose driver ignores one operation."""

    forgets = ""

    def apply(self, op) -> None:
        if op.name != self.forgets:
            ModelStorage.apply(self, op)


@pytest.mark.parametrize("forgets", ["sync", "sync_folder"])
def test_the_crash_model_would_notice_a_missing_sync(forgets: str) -> None:
    storage = Forgetful()
    save_step(storage, 1)
    for folder in (Path("/"), Path("/runs"), ROOT, ROOT / "step-1"):
        storage.sync_folder(folder)
    storage.forgets = forgets
    save_step(storage, 2)

    def broken(after: ModelStorage) -> bool:
        try:
            return loaded(after) != 2
        except CheckpointError:
            return True

    assert any(broken(storage.crash(len(storage.journal), survival)) for survival in SURVIVALS)


def count_operations(setup: Callable[[ModelStorage], None], action: Callable[[Storage], None]) -> int:
    storage, seen = ModelStorage(), []
    setup(storage)
    action(FaultyStorage(storage, lambda operation, path: seen.append(operation)))
    return sum(operation in WRITING for operation in seen)


def raised_by(action: Callable[[Storage], None], storage: Storage) -> CheckpointWriteError | None:
    try:
        action(storage)
    except CheckpointWriteError as error:
        return error
    return None


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_fault_in_any_operation_is_a_named_error_and_leaves_what_was(code: int, overwrite: bool) -> None:
    def setup(storage: ModelStorage) -> None:
        save_step(storage, 1, "x")

    def action(storage: Storage) -> None:
        save_step(storage, 2, "x" if overwrite else "y", overwrite=overwrite)

    outcomes = set()
    for number in range(count_operations(setup, action)):
        storage = ModelStorage()
        setup(storage)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            error = raised_by(action, FaultyStorage(storage, fail_at(number, code)))
        if error is None:
            outcomes.add("warned")
            assert [each.category for each in warned] == [CheckpointWarning]
            assert loaded(storage) == 2
        else:
            outcomes.add("raised")
            assert re.search(rf"rank [01]: .*{errno.errorcode[code]}", str(error))
            assert error.path.startswith(str(ROOT))
            assert error.rank in (0, 1)
            assert loaded(storage) in (1, 2)
            assert "x" in storage.names(ROOT), "put back under its own name"
            assert not [name for name in storage.names(ROOT) if name.startswith(".tmp")]
        save_step(storage, 3)
        assert loaded(storage) == 3
    assert outcomes == ({"raised", "warned"} if overwrite else {"raised"})


def test_a_disk_that_fails_for_good_is_a_named_error_on_every_rank() -> None:
    storage = ModelStorage()
    save_step(storage, 1)

    def full(operation: str, path: Path) -> None:
        if operation in ("write", "remove") and "rank00001" in path.name:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def rank(peers: Peers) -> None:
        shards = [whole(f"w{peers.rank}", torch.zeros(4))]
        save(ROOT, "b", shards=shards, objects={}, peers=peers, storage=FaultyStorage(storage, full))

    with pytest.warns(CheckpointWarning, match="could not remove"):
        outcomes = run_threads(rank, 2)
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointWriteError)
        assert outcome.error.rank == 1
        words = (
            r"while writing: rank 1: .*rank00001.safetensors: No space left.*\(ENOSPC\): the file needs \d+ bytes, "
        )
        assert re.search(words + r"[\d,]+ are free", str(outcome.error))
    assert loaded(storage) == 1


def test_too_little_space_is_told_before_the_first_byte_with_both_numbers() -> None:
    storage = ModelStorage(free=100)
    with pytest.raises(CheckpointWriteError, match=r"needs [\d,]+ bytes, 100 are free. Nothing was written"):
        save_step(storage, 1)
    assert storage.names(ROOT) == []


def test_a_second_job_is_told_who_saves_and_nothing_is_mixed() -> None:
    storage = ModelStorage()
    make_root(storage, ROOT)
    lock = storage.lock(ROOT / ".lock", "pid 7 on elsewhere, tag 'z'")
    unfinished = ROOT / ".tmp-z-0123456789abcdef"
    storage.make_folder(unfinished)
    with pytest.raises(
        CheckpointWriteError, match=r"another job is saving into /runs/a: pid 7 on elsewhere, tag 'z'"
    ):
        save_step(storage, 1)
    assert storage.names(ROOT) == [unfinished.name]
    lock.release()
    save_step(storage, 1)
    assert storage.names(ROOT) == ["latest", "step-1"]
    assert storage.locks == {}


def test_without_locks_nothing_of_others_is_swept() -> None:
    class NoLocks(ModelStorage):
        def lock(self, path: Path, owner: str):
            made = super().lock(path, owner)
            return type(made)(self, path, is_exclusive=False)

    storage = NoLocks()
    make_root(storage, ROOT)
    storage.make_folder(ROOT / ".tmp-z-0123456789abcdef")
    save_step(storage, 1)
    assert ".tmp-z-0123456789abcdef" in storage.names(ROOT)


def test_a_manifest_that_its_own_reader_would_refuse_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.storage import safetensors_file as safefile

    monkeypatch.setattr(safefile, "write", lambda writer, layout, tensors: ["no checksum" for _ in layout.parts])
    storage = ModelStorage()
    with pytest.raises(CheckpointError, match=r"while committing: rank 0: .*is not hex digits"):
        save_step(storage, 1)
    assert storage.names(ROOT) == []


def test_a_sweep_takes_only_what_attempts_left() -> None:
    storage = ModelStorage()
    save_step(storage, 1, "x")
    for name in (".tmp-x-0123456789abcdef", "not a checkpoint", ".git", ".tmp-mine"):
        storage.make_folder(ROOT / name)
    storage.create(ROOT / ".latest-0123456789abcdef")
    storage.rename(ROOT / "x", ROOT / ".old-x-0123456789abcdef")
    sweep(storage, ROOT)
    assert storage.names(ROOT) == [".git", ".tmp-mine", "latest", "not a checkpoint", "x"]
    assert loaded(storage) == 1


def test_what_a_crash_moved_aside_goes_when_its_tag_is_there_again() -> None:
    storage = ModelStorage()
    save_step(storage, 1, "x")
    storage.rename(ROOT / "x", ROOT / ".old-x-0123456789abcdef")
    storage.make_folder(ROOT / "x")
    sweep(storage, ROOT)
    assert storage.names(ROOT) == ["latest", "x"]


def test_removal_begins_with_the_manifest() -> None:
    """A folder that is half removed must not look like a checkpoint."""
    storage = ModelStorage()
    save_step(storage, 1)
    before = len(storage.journal)
    remove(storage, ROOT / "step-1")
    removed = [op.path.name for op in storage.journal[before:]]
    assert removed == ["manifest.json", "rank00000.safetensors", "rank00001.safetensors", "step-1"]


def test_a_manifest_that_no_reader_would_take_is_refused_before_it_is_committed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage = ModelStorage()
    save_step(storage, 1)
    monkeypatch.setattr(manifests, "MAX_NBYTES", 10_000)
    with pytest.raises(CheckpointInputError, match="readers accept at most 10,000: pass large objects as tensors"):
        save(ROOT, "big", objects={"x": "y" * 10_000}, step=2, storage=storage)
    assert loaded(storage) == 1
