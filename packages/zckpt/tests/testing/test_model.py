from pathlib import Path

import pytest

from zckpt.storage.storage import PathKind, read_all
from zckpt.testing import SURVIVALS, Kept, ModelStorage, Survival
from zckpt.testing.model import KILLED

POWER_CUT = Survival(Kept.SYNCED, Kept.SYNCED, Kept.SYNCED)
NAMES_ONLY = Survival(Kept.WRITTEN, Kept.WRITTEN, Kept.SYNCED)


def storage() -> ModelStorage:
    """/d/f holds b"old", durable; then b"new" is written over it in the usual unsafe way, without a sync."""
    made = ModelStorage()
    made.make_folder(Path("/d"))
    made.sync_folder(Path("/"))
    with made.create(Path("/d/f")) as writer:
        writer.write(memoryview(b"old"))
        writer.sync()
    made.sync_folder(Path("/d"))
    with made.create(Path("/d/g")) as writer:
        writer.write(memoryview(b"new"))
    made.rename(Path("/d/g"), Path("/d/f"))
    return made


@pytest.mark.parametrize(("survival", "content"), [(KILLED, b"new"), (POWER_CUT, b"old"), (NAMES_ONLY, b"")])
def test_a_rename_without_a_sync_survives_a_kill_and_not_a_power_cut(survival: Survival, content: bytes) -> None:
    made = storage()
    assert read_all(made.crash(len(made.journal), survival), Path("/d/f"), 10) == content


def test_a_write_may_be_torn() -> None:
    made = storage()
    at = next(i for i, op in enumerate(made.journal) if op.name == "write" and op.path.name == "g")
    assert read_all(made.crash(at + 1, KILLED), Path("/d/g"), 10) == b"n"


def test_a_crash_changes_nothing_in_the_storage_it_happens_to_and_can_be_followed_by_another() -> None:
    made = storage()
    before = list(made.journal)
    after = made.crash(len(made.journal), POWER_CUT)
    after.remove(Path("/d/f"))
    assert made.journal == before
    assert made.kind(Path("/d/f")) is PathKind.FILE
    assert after.crash(1, KILLED).kind(Path("/d/f")) is PathKind.ABSENT
    assert after.crash(0, KILLED).kind(Path("/d/f")) is PathKind.FILE
    assert after.crash(1, POWER_CUT).kind(Path("/d/f")) is PathKind.FILE


def test_survivals_are_all_eight_and_a_kill_is_one() -> None:
    assert len(set(SURVIVALS)) == 8
    assert KILLED in SURVIVALS


def test_a_lock_does_not_survive() -> None:
    made = storage()
    made.lock(Path("/d/.lock"), "me")
    made.crash(len(made.journal), KILLED).lock(Path("/d/.lock"), "you")
