"""Bytes that each rank reads, counted at the storage instead of taken from the report."""

import os
import resource
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch

from zckpt import CheckpointCorrupt, Peers, ReadRequest, Shard, find, save, whole
from zckpt.loading import run_reads as fetching
from zckpt.saving import plan as planning
from zckpt.storage import frugal_reader
from zckpt.storage.frugal_reader import TRIAL_NBYTES, UNKNOWN, Access
from zckpt.storage.storage import LOCAL, LocalStorage, Reader
from zckpt.testing import run_threads

SHAPES = {"wte": (1003, 192), "up": (768, 192), "down": (192, 768), "bias": (768,), "scalar": ()}


def values() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{key}.{name}": torch.rand(shape, generator=generator)
        for key in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
        for name, shape in SHAPES.items()
    }


def cut(tensors: dict[str, torch.Tensor], stage: int, rank: int, ranks: int) -> list[Shard]:
    """Shards at a ZeRO stage: 0 whole; 1 and 2 moments by flat buffer; 3 each tensor by itself."""
    made, flat, total = [], 0, sum(each.numel() for each in tensors.values())
    low, high = total * rank // ranks, total * (rank + 1) // ranks
    for name, tensor in tensors.items():
        numel = tensor.numel()
        if stage == 0 or (stage < 3 and name.startswith("model")):
            span = (0, numel)
        elif stage == 3:
            span = (numel * rank // ranks, numel * (rank + 1) // ranks)
        else:
            span = (min(max(low - flat, 0), numel), min(max(high - flat, 0), numel))
        flat += numel
        box = tuple((0, size) for size in tensor.shape)
        part = tensor.reshape(-1)[span[0] : span[1]].clone()
        made.append(Shard(name, tuple(tensor.shape), box, span, part))
    return made


@attrs.frozen(eq=False)
class Counting:
    """A LocalStorage whose readers count the bytes read from tensor files."""

    inner: LocalStorage
    nbytes_read: list[int]
    buffers: set[tuple[int, int]] = attrs.field(factory=set)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader:
        counts = (self.nbytes_read, self.buffers) if "rank" in path.name else ([], set())
        return CountingReader(self.inner.open(path, access=access), *counts)  # type: ignore[return-value]


@attrs.frozen(eq=False)
class CountingReader:
    inner: Reader
    nbytes_read: list[int]
    buffers: set[tuple[int, int]]  # address and bytes of what was read into

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self.nbytes_read.append(len(buffer))
        self.buffers.add((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)))
        self.inner.read_into(offset, buffer)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def __enter__(self) -> "CountingReader":
        return self

    def __exit__(self, *exc: object) -> None:
        self.inner.__exit__(*exc)


@pytest.mark.parametrize("saved", [(a, s) for a in (1, 2, 4) for s in (0, 1, 2, 3)], ids=str)
def test_any_world_and_stage_loads_at_any_other_and_reads_its_part(
    tmp_path: Path, saved: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MIN_NBYTES", 100_000)  # several files a rank, and tensors cut between them
    monkeypatch.setattr(fetching, "_THREAD_NBYTES", 100_000)  # and several threads reading
    monkeypatch.setattr(fetching, "_JOB_NBYTES", 64 << 10)
    world, stage = saved
    tensors = values()

    def saving(peers: Peers) -> None:
        save(tmp_path, "a", shards=cut(tensors, stage, peers.rank, world), peers=peers)

    assert [each.error for each in run_threads(saving, world)] == [None] * world
    for world in (1, 2, 4):
        for stage in (0, 1, 2, 3):
            check_load(tmp_path, tensors, world, stage)


def test_streams_are_neighbours_of_about_equal_bytes() -> None:
    sizes = [4, 4, 1, 4, 2, 4, 4, 3, 4]
    stretches = [fetching._Stretch(sum(sizes[:at]), size, lambda reader: 0) for at, size in enumerate(sizes)]
    streams = list(fetching._streams(stretches[::-1], 10))
    assert [each for stream in streams for each in stream] == stretches
    assert [sum(each.nbytes for each in stream) for stream in streams] == [9, 10, 11]
    empty = [fetching._Stretch(0, 0, lambda reader: 0)] * 2
    assert list(fetching._streams(empty, 0)) == [empty]


def check_load(root: Path, tensors: dict[str, torch.Tensor], world: int, stage: int) -> None:
    def loading(peers: Peers) -> tuple[int, int]:
        expected = cut(tensors, stage, peers.rank, world)
        live = [attrs.evolve(shard, tensor=torch.zeros_like(shard.tensor)) for shard in expected]
        counted: list[int] = []
        storage = Counting(LOCAL, counted)
        report = find(root, storage=storage).read(live, peers=peers)  # type: ignore[arg-type]
        for shard, source in zip(live, expected):
            assert shard.tensor.equal(source.tensor), shard.name
        assert sum(counted) >= report.read_nbytes
        return sum(counted), sum(shard.tensor.nbytes for shard in live)

    for outcome in run_threads(loading, world):
        assert outcome.error is None
        assert outcome.value is not None
        read, wanted = outcome.value
        headers = 4 * 3000  # of the files it opens
        assert read <= 1.05 * wanted + headers, (world, stage, read / wanted)


def test_tensors_that_are_cut_otherwise_are_gathered_by_few_opens_of_a_file(tmp_path: Path) -> None:
    tensors = {f"w{index}": torch.rand(8, 6) for index in range(100)}
    save(tmp_path, "a", tensors=tensors)
    halves = [Shard(name, (8, 6), ((0, 8), (0, 3)), (0, 24), torch.zeros(24)) for name in tensors]
    opened: list[int] = []

    @attrs.frozen(eq=False)
    class Opens(Counting):
        def open(self, path: Path, *, access: Access = UNKNOWN) -> Reader:
            opened.append("rank" in path.name)
            return self.inner.open(path, access=access)

    find(tmp_path, storage=Opens(LOCAL, [])).read(halves)  # type: ignore[arg-type]
    assert all(half.tensor.view(8, 3).equal(tensors[half.name][:, :3]) for half in halves)
    assert 1 <= sum(opened) <= 2, "one for the header, one for all runs"


def test_a_flip_anywhere_in_a_chunk_around_the_slice_is_noticed_and_elsewhere_is_not(tmp_path: Path) -> None:
    path = save(tmp_path, "a", tensors={"w": torch.rand(100_000)})
    file = path / "rank00000.safetensors"
    data = bytearray(file.read_bytes())
    start = len(data) - 400_000
    data[start + 41_000] ^= 1  # bytes 40,960 to 45,056 are a chunk
    file.write_bytes(data)

    def read(first: int, last: int) -> None:
        live = torch.zeros(last - first)
        find(tmp_path).read([Shard("w", (100_000,), ((0, 100_000),), (first, last), live)])

    read(0, 10_240)  # up to the chunk
    read(11_264, 100_000)  # from behind it
    for first, last in [(0, 10_241), (11_263, 100_000), (10_300, 10_301)]:
        with pytest.raises(CheckpointCorrupt, match=r"bytes [\d,]+ to [\d,]+\): checksum"):
            read(first, last)


def test_a_checkpoint_of_many_files_is_read_with_few_of_them_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "_MIN_NBYTES", 1)  # a file for each writer of however little
    expected = {f"w{n:03}": torch.full((2,), float(n)) for n in range(192)}

    def rank(peers: Peers) -> None:
        mine = {name: tensor for n, (name, tensor) in enumerate(expected.items()) if n % 3 == peers.rank}
        save(tmp_path, "a", tensors=mine, writers=64, peers=peers)

    assert [each.error for each in run_threads(rank, 3)] == [None] * 3
    found = find(tmp_path)
    assert len(found.manifest.files) == 192
    live = {name: torch.zeros(2) for name in expected}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 150, hard))
    try:
        found.read([whole(name, tensor) for name, tensor in live.items()], verify="first")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(tensor.equal(expected[name]) for name, tensor in live.items())


def disk_nbytes() -> int:
    """Bytes that this process has read from a disk so far."""
    return int(Path("/proc/self/io").read_text().split("read_bytes: ")[1].split()[0])


@pytest.mark.parametrize("cheap_s", [1.0, 0.0], ids=["cheap pages", "expensive pages"])
def test_verifying_first_reads_the_disk_once_and_holds_no_second_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cheap_s: float
) -> None:
    monkeypatch.setattr(frugal_reader, "_CHEAP_S_PER_BYTE", cheap_s)
    for way in TRIAL_NBYTES:
        monkeypatch.setitem(TRIAL_NBYTES, way, 1 << 20)
    expected = {name: torch.rand(2 << 20) for name in ("a", "b", "c")}
    total = sum(each.nbytes for each in expected.values())
    for path in save(tmp_path, "a", tensors=expected, writers=1).iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    live = {name: torch.zeros_like(each) for name, each in expected.items()}
    buffers: set[tuple[int, int]] = set()
    storage = Counting(LOCAL, [], buffers)
    start = disk_nbytes()
    wanted = [whole(name, tensor) for name, tensor in live.items()]
    copy = find(tmp_path, storage=storage).prepare_read(ReadRequest(wanted, verify="first", readers=2))  # type: ignore[arg-type]
    verified = disk_nbytes()
    assert sum(nbytes for _, nbytes in buffers) < total / 3  # the same few buffers
    assert not any(each.any() for each in live.values())
    buffers.clear()
    copy()
    assert all(live[name].equal(each) for name, each in expected.items())
    own = [range(each.data_ptr(), each.data_ptr() + each.nbytes) for each in live.values()]
    assert sum(nbytes for address, nbytes in buffers if any(address in each for each in own)) == total
    assert sum(nbytes for _, nbytes in buffers) < 1.1 * total  # past the buffers
    assert disk_nbytes() - verified < 0.1 * total
    assert verified - start < 1.3 * total  # 0 where the files are in memory (tmpfs)
