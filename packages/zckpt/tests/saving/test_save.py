import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from zckpt import (
    ALONE,
    LOCAL,
    CheckpointError,
    CheckpointExists,
    CheckpointInputError,
    CheckpointWriteError,
    Peers,
    Shard,
    ShardLike,
    find,
    save,
    whole,
)
from zckpt.saving import plan as planning
from zckpt.testing import FaultyStorage, ModelStorage, run_threads


def test_a_checkpoint_is_its_manifest_one_file_a_writer_and_latest(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "a"
    path = save(root, "step-1", shards=[whole("w", torch.ones(2, 3))], objects={"x": 1}, step=1)
    assert path == root / "step-1"
    assert sorted(each.name for each in path.iterdir()) == ["manifest.json", "rank00000.safetensors"]
    assert (root / "latest").read_text() == "step-1\n"
    assert load_file(path / "rank00000.safetensors")["w"].equal(torch.ones(2, 3))
    assert sorted(each.name for each in root.iterdir()) == [".lock", "latest", "step-1"]


def test_the_order_of_torch_save_is_told(tmp_path: Path) -> None:
    wrong: Any = {"w": torch.ones(2)}
    with pytest.raises(CheckpointInputError, match=r"a path; got a dict\. Write save\(folder, tensors=\{\.\.\.\}\)"):
        save(wrong, str(tmp_path / "w"))
    assert list(tmp_path.iterdir()) == []


def test_latest_stays_when_it_is_not_wanted(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[], objects={})
    save(tmp_path, "b", shards=[], objects={}, latest=False)
    assert (tmp_path / "latest").read_text() == "a\n"


def test_a_taken_tag_is_refused_unless_it_may_be_replaced(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[whole("w", torch.zeros(2))], objects={})
    with pytest.raises(CheckpointExists, match=r"a exists: choose another tag, or replace it with overwrite=True"):
        save(tmp_path, "a", shards=[whole("w", torch.ones(2))], objects={})
    assert find(tmp_path).tensor("w").tolist() == [0, 0]
    save(tmp_path, "a", shards=[whole("w", torch.ones(2))], objects={}, overwrite=True)
    assert find(tmp_path).tensor("w").tolist() == [1, 1]
    assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "a", "latest"]


def test_a_folder_that_is_no_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "thesis.tex").write_text("dear reader")
    with pytest.raises(CheckpointExists, match="is not a checkpoint"):
        save(tmp_path, "a", shards=[], objects={}, overwrite=True)
    assert (tmp_path / "a" / "thesis.tex").exists()


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_root_that_cannot_be_is_told_before_any_tensor_is_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"while preparing: rank 0: .*file.*(NOTDIR|EEXIST)"):
        save(tmp_path / name, "a", shards=[Unreadable()], objects={})


def test_a_read_only_root_is_told_before_any_tensor_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(path: object, *args: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("zckpt.storage.storage.os.open", refuse)
    with pytest.raises(CheckpointWriteError, match="Read-only file system"):
        save(tmp_path, "a", shards=[Unreadable()], objects={})


class Unreadable:
    """A shard whose values must not be read; its first access is the address check."""

    name, global_shape, box, span = "w", (2,), ((0, 2),), (0, 2)
    asked = 0

    @property
    def tensor(self) -> torch.Tensor:
        return torch.zeros(2).as_subclass(Poisoned)


class Poisoned(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.detach, torch.Tensor.numpy, torch.Tensor.view):
            raise AssertionError("values were read")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"tag": "../a"}, "tag '../a'"),
        ({"objects": {"x": object()}}, r"objects\['x'\] is a builtins.object"),
        ({"rank_objects": {"x": float("nan")}}, r"rank_objects\['x'\] is nan"),
        ({"step": -1}, "step must be an int of at least 0, not -1"),
        ({"shards": [Shard("w", (3,), ((0, 3),), (0, 2), torch.zeros(2))]}, "pieces cover 2 of 3"),
    ],
)
def test_what_cannot_be_saved_is_refused_and_leaves_no_trace(tmp_path: Path, arguments, words: str) -> None:
    with pytest.raises(CheckpointInputError, match=words):
        save(**{"root": tmp_path / "r", "tag": "a", "shards": [], "objects": {}, **arguments})
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_disagree_all_raise_the_same_error(tmp_path: Path) -> None:
    outcomes = run_threads(lambda p: save(tmp_path, f"t{p.rank % 2}", shards=[], objects={}, peers=p), 3)
    assert len({str(each.error) for each in outcomes}) == 1
    assert "ranks disagree on tag (save arguments): 't0' (rank 0, 2), 't1' (rank 1)" in str(outcomes[0].error)
    assert list(tmp_path.iterdir()) == []


def test_one_rank_with_a_bad_shard_stops_all_before_the_disk_is_touched(tmp_path: Path) -> None:
    def rank(peers: Peers) -> None:
        shards: list[ShardLike] = [whole("w", torch.zeros(2))] if peers.rank else [Unsavable()]
        save(tmp_path, "a", shards=shards, objects={}, peers=peers)

    class Unsavable:
        name, global_shape, box, span, tensor = "w", (2,), ((0, 2),), (0, 2), torch.zeros(2, dtype=torch.complex128)

    outcomes = run_threads(rank, 2)
    for each in outcomes:
        assert isinstance(each.error, CheckpointInputError)
        assert "rank 0: dtype torch.complex128" in str(each.error)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_dies_in_a_save_is_a_named_error_for_the_rest_and_leaves_the_previous(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[], objects={}, step=1)

    class DeadAfterWriting:
        def __init__(self, peers: Peers) -> None:
            self.peers, self.rank, self.world_size, self.count = peers, peers.rank, peers.world_size, 0

        def exchange(self, value):
            self.count += 1
            if self.count == 3:
                raise SystemExit
            return self.peers.exchange(value)

    def rank(peers: Peers) -> None:
        shards = [whole(f"w{peers.rank}", torch.zeros(2))]
        peers = DeadAfterWriting(peers) if peers.rank else peers
        save(tmp_path, "b", shards=shards, objects={}, peers=peers, step=2)

    outcomes = run_threads(rank, 2)
    assert isinstance(outcomes[0].error, CheckpointWriteError)
    assert "while writing: rank 0 lost its peers" in str(outcomes[0].error)
    assert find(tmp_path).tag == "a"
    assert not list(tmp_path.glob(".tmp*"))


def test_nothing_is_drawn_from_the_random_generators(tmp_path: Path) -> None:
    from zckpt.sources import rng

    before = rng.capture()
    save(tmp_path, "a", shards=[whole("w", torch.zeros(2))], objects={})
    find(tmp_path).tensor("w")
    assert rng.capture() == before


def test_an_empty_checkpoint_and_ranks_without_files(tmp_path: Path) -> None:
    def rank(peers: Peers) -> None:
        shards = [whole("w", torch.ones(3))] if peers.rank == 1 else [whole("e", torch.zeros(0, 3))]
        save(tmp_path, "a", shards=shards, objects={}, rank_objects={"r": peers.rank}, peers=peers)

    assert [each.error for each in run_threads(rank, 3)] == [None] * 3
    found = find(tmp_path)
    assert list(found.manifest.files) == ["rank00001.safetensors"]
    assert [found.rank_objects(rank)["r"] for rank in range(3)] == [0, 1, 2]
    assert found.tensor("e").shape == (0, 3)
    save(tmp_path, "none", shards=[], objects={}, step=9)
    assert find(tmp_path).names() == ()


def test_the_same_state_gives_the_same_bytes_but_for_the_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("zckpt.saving.save.secrets.token_hex", lambda nbytes: "0123456789abcdef")
    for root in ("a", "b"):
        save(
            tmp_path / root, "t", shards=[whole("w", torch.ones(5)), whole("b", torch.ones(2))], objects={"z": [1.5]}
        )
    for name in ("manifest.json", "rank00000.safetensors"):
        assert (tmp_path / "a" / "t" / name).read_bytes() == (tmp_path / "b" / "t" / name).read_bytes()


def test_each_rank_syncs_its_file_and_the_name_of_it_before_it_votes() -> None:
    """On a file system of several machines no other rank can do that for it."""
    storage, voted = ModelStorage(), []

    class Watched:
        def __init__(self, peers: Peers) -> None:
            self.peers, self.rank, self.world_size = peers, peers.rank, peers.world_size

        def exchange(self, value):
            voted.append((self.rank, value, len(storage.journal)))
            return self.peers.exchange(value)

    def rank(peers: Peers) -> None:
        shards = [whole(f"w{peers.rank}", torch.zeros(2))]
        save("/r", "a", shards=shards, objects={}, peers=Watched(peers), storage=storage)

    run_threads(rank, 2)
    for rank_, at in [(rank, at) for rank, value, at in voted if isinstance(value.get("ok"), list)]:
        names = [op.name for op in storage.journal[:at] if f"rank{rank_:05d}" in op.path.name]
        assert names[0] == "create"
        assert names[-1] == "sync"
        synced = next(
            i for i, op in enumerate(storage.journal) if op.name == "sync" and f"{rank_:05d}" in op.path.name
        )
        assert any(op.name == "sync_folder" for op in storage.journal[synced:at])


def test_a_storage_of_ones_own_is_all_that_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.storage.storage.os", None)
    storage = ModelStorage()
    save("/r", "a", shards=[whole("w", torch.ones(5))], objects={}, peers=ALONE, storage=storage)
    assert find("/r", storage=storage).tensor("w").equal(torch.ones(5))


def test_an_error_of_the_callers_own_code_is_its_own_here_and_named_elsewhere(tmp_path: Path) -> None:
    def shards(peers: Peers) -> Iterator[ShardLike]:
        if peers.rank == 1:
            raise ZeroDivisionError("in the caller's generator")
        yield whole("w", torch.ones(2))

    outcomes = run_threads(lambda peers: save(tmp_path, "a", shards=shards(peers), peers=peers), 2)
    assert isinstance(outcomes[1].error, ZeroDivisionError)
    assert isinstance(outcomes[0].error, CheckpointWriteError)
    assert "rank 1: ZeroDivisionError: in the caller's generator" in str(outcomes[0].error)


def test_an_error_in_any_writers_thread_is_the_saves_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_MIN_NBYTES", 1000)
    shards = [whole(f"w{n}", torch.rand(1000)) for n in range(8)]
    save(tmp_path, "good", shards=shards, writers=4)
    names = sorted(each.name for each in (tmp_path / "good").iterdir())
    assert names == ["manifest.json", *(f"rank00000{n}.safetensors" for n in ("-1", "-2", "-3", ""))]
    for victim in names[1:]:

        def fail(operation: str, path: Path, victim: str = victim) -> None:
            if (operation, path.name) == ("write", victim):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        with pytest.raises(CheckpointWriteError, match=rf"{victim}: No space left.*needs [\d,]+ bytes"):
            save(tmp_path, "bad", shards=shards, writers=4, storage=FaultyStorage(LOCAL, fail))
        assert sorted(each.name for each in tmp_path.iterdir()) == [".lock", "good", "latest"]


MEMORY = """
import sys, torch, zckpt
from pathlib import Path

def resident(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if key in line)

def rise(work):
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    work()
    return (resident("VmHWM") - before) // 1024

root, tensors = sys.argv[1], {f"w{n}": torch.ones(8_000_000) for n in range(8)}
zckpt.save(root, "warm", tensors={"w": torch.ones(9)})
zckpt.load(root, "warm", tensors={"w": torch.ones(9)})
print(rise(lambda: zckpt.save(root, "a", tensors=tensors)), rise(lambda: zckpt.load(root, "a", tensors=tensors)))
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux to measure memory")
def test_a_save_and_a_load_take_little_memory_beside_the_state(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", MEMORY, str(tmp_path)], capture_output=True, text=True, timeout=600, check=True
    )
    save_mb, load_mb = map(int, ended.stdout.split())
    assert save_mb < 2 * 64  # two writers; of 256 MB
    assert load_mb < 64


def test_killed_ranks_never_lose_an_acknowledged_checkpoint(tmp_path: Path) -> None:
    rounds = os.environ.get("ZCKPT_KILLS", "12")
    command = [
        sys.executable,
        str(Path(__file__).with_name("kills.py")),
        str(tmp_path),
        rounds,
        os.environ.get("ZCKPT_SEED", "0"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * int(rounds), check=False)
    assert ended.returncode == 0, ended.stderr
    assert not [each.name for each in tmp_path.iterdir() if each.name.startswith((".tmp", ".old", ".latest"))]


# --- ranks that are processes ---------------------------------------------------------------------------------


class Gang:
    """Peers as a caller implements them with a communication library."""

    def __init__(self) -> None:
        import zcomm

        self.exchange = zcomm.all_gather_object
        self.rank, self.world_size = zcomm.group_rank(), zcomm.group_size()


def save_and_load_on_a_rank(root: str) -> tuple[list[float], str]:
    peers = Gang()
    mine = torch.full((3,), float(peers.rank))
    shard = Shard("w", (6,), ((0, 6),), (3 * peers.rank, 3 * peers.rank + 3), mine)
    save(root, "a", shards=[shard, whole("s", torch.ones(2))], objects={}, peers=peers)
    try:
        save(root, f"b{peers.rank}", shards=[], objects={}, peers=peers)
    except CheckpointError as error:
        message = str(error)
    return find(root).tensor("w").tolist(), message


def test_ranks_that_are_processes_save_together(tmp_path: Path) -> None:
    testing = pytest.importorskip("zcomm.testing")
    if not hasattr(testing, "run_ranks"):
        pytest.skip("zcomm.testing.run_ranks is not there yet")
    results = testing.run_ranks(save_and_load_on_a_rank, 2, str(tmp_path))
    for values, message in results:
        assert values == [0, 0, 0, 1, 1, 1]
        assert "ranks disagree on tag" in message
