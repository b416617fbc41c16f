import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zckpt import (
    LOCAL,
    CheckpointCorrupt,
    CheckpointMismatch,
    CheckpointReadError,
    LoadReport,
    Peers,
    Shard,
    find,
    open_checkpoint,
    save,
    whole,
)
from zckpt.format.safetensors_layout import _NAMES
from zckpt.testing import FaultyStorage, ModelStorage, run_threads


def model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (5, 4), "b": (4,), "c": (3, 2, 4), "s": (), "e": (0, 4)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def zeros() -> dict[str, torch.Tensor]:
    return {name: tensor * 0 for name, tensor in model().items()}


def spans(numel: int, ranks: int) -> list[tuple[int, int]]:
    """Uneven, as flat buckets cut them; some may be empty."""
    size = -(-numel // ranks)
    return [(min(size * rank, numel), min(size * (rank + 1), numel)) for rank in range(ranks)]


def sharded(tensors: dict[str, torch.Tensor], rank: int, ranks: int, columns: int) -> list[Shard]:
    """Last dims cut into `columns` boxes where they have more than one element, boxes into spans."""
    made = []
    data, column = divmod(rank, columns)
    for name, tensor in tensors.items():
        box = [(0, size) for size in tensor.shape]
        if tensor.dim():
            box[-1] = spans(tensor.shape[-1], columns)[column]
        part = tensor[(*(slice(*side) for side in box), ...)].reshape(-1)
        span = spans(part.numel(), ranks // columns)[data]
        made.append(Shard(name, tuple(tensor.shape), tuple(box), span, part[slice(*span)].clone()))
    return made


@pytest.fixture(scope="module")
def saved() -> ModelStorage:
    """One checkpoint a layout: /r/<ranks>-<columns>."""
    storage = ModelStorage()
    for ranks, columns in LAYOUTS:

        def rank(peers: Peers, columns: int = columns) -> None:
            shards = sharded(model(), peers.rank, peers.world_size, columns)
            save("/r", f"{peers.world_size}-{columns}", shards=shards, objects={}, peers=peers, storage=storage)

        assert [outcome.error for outcome in run_threads(rank, ranks)] == [None] * ranks
    return storage


LAYOUTS = [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2), (4, 4), (6, 3)]


@pytest.mark.parametrize(("saved_ranks", "saved_columns"), LAYOUTS)
@pytest.mark.parametrize(("ranks", "columns"), LAYOUTS)
def test_a_load_is_bit_equal_at_any_other_world_size_and_cut(
    saved: ModelStorage, saved_ranks: int, saved_columns: int, ranks: int, columns: int
) -> None:
    def rank(peers: Peers) -> None:
        expected = sharded(model(), peers.rank, peers.world_size, columns)
        wanted = sharded(
            {name: tensor * 0 for name, tensor in model().items()}, peers.rank, peers.world_size, columns
        )
        found = find("/r", f"{saved_ranks}-{saved_columns}", storage=saved)
        report = found.read(wanted, peers=peers)
        assert report.loaded == ("a", "b", "c", "e", "s")
        for mine, theirs in zip(wanted, expected):
            assert mine.tensor.equal(theirs.tensor), mine.name

    assert [outcome.error for outcome in run_threads(rank, ranks)] == [None] * ranks


@settings(max_examples=40, deadline=None)
@given(st.data(), st.lists(st.integers(1, 5), max_size=3).map(tuple), st.integers(1, 4))
def test_any_wanted_region_is_what_slicing_gives(data, shape: tuple[int, ...], ranks: int) -> None:
    storage = ModelStorage()
    values = torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.float32)
    columns = data.draw(st.sampled_from([c for c in (1, 2, 4) if ranks % c == 0]))
    peers_shards = [sharded({"w": values}, rank, ranks, columns) for rank in range(ranks)] if shape else []
    shards = [shard for mine in peers_shards for shard in mine] or [whole("w", values)]
    shards = [shard for shard in shards if shard.tensor.numel()]
    save("/r", "a", shards=shards, objects={}, storage=storage)
    box = tuple(tuple(sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n))))) for n in shape)
    part = values[(*(slice(*side) for side in box), ...)].reshape(-1)
    start, stop = sorted((data.draw(st.integers(0, part.numel())), data.draw(st.integers(0, part.numel()))))
    live = torch.full((stop - start,), -1.0)
    find("/r", storage=storage).read([Shard("w", shape, box, (start, stop), live)])
    assert live.equal(part[start:stop])


@pytest.mark.parametrize("dtype", list(_NAMES))
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    bits = torch.arange(8 * dtype.itemsize, dtype=torch.uint8)
    tensor = (bits % 2 if dtype is torch.bool else bits).view(dtype)[: 8 if dtype is torch.bool else None]
    save(tmp_path, "a", shards=[whole("w", tensor)], objects={})
    again = find(tmp_path).tensor("w")
    assert again.dtype == dtype
    assert again.view(torch.uint8).equal(tensor.view(torch.uint8))


def test_one_element_may_have_any_stride(tmp_path: Path) -> None:
    """torch calls it contiguous, but cannot view it as bytes."""
    one = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:1, 1]
    assert one.stride() == (2,)
    save(tmp_path, "a", shards=[Shard("w", (1,), ((0, 1),), (0, 1), one)], objects={})
    live = torch.zeros(2, 2)[1:, 0]
    find(tmp_path).read([Shard("w", (1,), ((0, 1),), (0, 1), live)])
    assert live.tolist() == [2]


def test_nans_keep_their_bits(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FC00001, -1, 0x7F800000, -0x80000000], dtype=torch.int32)
    save(tmp_path, "a", shards=[whole("w", bits.view(torch.float32))], objects={})
    assert find(tmp_path).tensor("w").view(torch.int32).equal(bits)


def test_objects_come_back_and_each_rank_has_its_own() -> None:
    storage = ModelStorage()

    def rank(peers: Peers) -> None:
        mine = {"seed": peers.rank * 10}
        save("/r", "a", shards=[], objects={"x": [1, {"y": None}]}, rank_objects=mine, peers=peers, storage=storage)

    run_threads(rank, 2)
    found = find("/r", storage=storage)
    assert found.objects == {"x": [1, {"y": None}]}
    assert [found.rank_objects(rank) for rank in range(2)] == [{"seed": 0}, {"seed": 10}]
    with pytest.raises(CheckpointMismatch, match="saved by 2 ranks: it has no objects of rank 2"):
        found.rank_objects(2)
    assert (found.tag, found.names(), found.manifest.world_size) == ("a", (), 2)


def test_nothing_is_written_if_anything_is_wrong(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[whole("a", torch.ones(4)), whole("b", torch.ones(4))], objects={})
    live = torch.zeros(4)
    for other in (whole("x", torch.zeros(1)), whole("b", torch.zeros(5)), whole("b", torch.zeros(4).int())):
        with pytest.raises(CheckpointMismatch, match="nothing was loaded"):
            find(tmp_path).read([whole("a", live), other])
    assert live.tolist() == [0] * 4
    report = find(tmp_path).read([whole("a", live), whole("x", torch.zeros(1))], strict=False)
    assert (report.loaded, report.missing, report.extra) == (("a",), ("x",), ("b",))
    assert live.tolist() == [1] * 4


def test_floats_are_converted_on_request(tmp_path: Path) -> None:
    values = torch.rand(10)
    save(tmp_path, "a", shards=[whole("w", values)], objects={})
    live = torch.zeros(10, dtype=torch.bfloat16)
    with pytest.raises(CheckpointMismatch, match="cast=True converts"):
        find(tmp_path).read([whole("w", live)])
    find(tmp_path).read([whole("w", live)], cast=True)
    assert live.equal(values.bfloat16())


def test_parameters_that_need_gradients_are_filled(tmp_path: Path) -> None:
    source, target = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    save(tmp_path, "a", shards=[whole(name, each) for name, each in source.named_parameters()], objects={})
    find(tmp_path).read([whole(name, each) for name, each in target.named_parameters()])
    assert target.weight.equal(source.weight)
    assert target.weight.requires_grad


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[whole("w", torch.rand(1000, 1000)), whole("v", torch.rand(1000))], objects={})
    rows = Shard("w", (1000, 1000), ((10, 12), (0, 1000)), (0, 2000), torch.zeros(2000))
    assert find(tmp_path).read([rows], strict=False, verify=False).read_nbytes == 8000


@pytest.mark.parametrize(("verify", "stage"), [("first", "verifying"), (True, "copying")])
def test_a_bad_piece_of_one_rank_is_every_ranks_error_and_no_rank_is_filled_if_that_comes_first(
    verify: bool | Literal["first"], stage: str
) -> None:
    storage = ModelStorage()

    def saving(peers: Peers) -> None:
        save("/r", "a", shards=sharded(model(), peers.rank, 2, 1), objects={}, peers=peers, storage=storage)

    run_threads(saving, 2)
    file = storage._file(Path("/r/a/rank00001.safetensors"))
    file.data = file.data[:-1] + bytes([file.data[-1] ^ 1])
    live = [sharded(zeros(), rank, 2, 1) for rank in range(2)]

    def read(peers: Peers) -> LoadReport:
        return find("/r", storage=storage).read(live[peers.rank], verify=verify, peers=peers)

    outcomes = run_threads(lambda peers: read(peers), 2)
    for outcome in outcomes:
        assert isinstance(outcome.error, CheckpointCorrupt)
        assert f"failed while {stage}: rank 1:" in str(outcome.error)
        assert ("Tensors are partly filled" in str(outcome.error)) == (verify is True)
    assert any(shard.tensor.any() for shards in live for shard in shards) == (verify is True)


def test_a_disk_error_while_reading_is_named(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[whole("w", torch.rand(10))], objects={})

    def broken(operation: str, path: Path) -> None:
        if operation == "read_into" and "rank" in path.name:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    found = open_checkpoint(tmp_path / "a", storage=FaultyStorage(LOCAL, broken))
    with pytest.raises(CheckpointReadError, match=r"while copying: rank 0: .*rank00000.safetensors: Input/output"):
        found.tensor("w")


def test_a_name_that_is_not_there(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[], objects={})
    with pytest.raises(CheckpointMismatch, match="has no tensor 'w'"):
        find(tmp_path).tensor("w")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_gpu_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    values = torch.rand(1000, 33, device="cuda")
    save(tmp_path, "a", shards=[whole("w", values)], objects={})
    live = torch.zeros(1000, 33, device="cuda")
    find(tmp_path).read([whole("w", live)])
    assert live.equal(values)


def test_what_one_ranks_generator_raises_is_every_ranks_error(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"w": torch.ones(1)})

    def wanted(rank: int) -> Iterator[Shard]:
        yield whole("w", torch.zeros(1))
        if rank:
            raise KeyError("no such tensor")

    for outcome in run_threads(lambda peers: find(tmp_path).read(wanted(peers.rank), peers=peers), 2):
        assert isinstance(outcome.error, CheckpointReadError)
        assert "failed while checking: rank 1: KeyError: 'no such tensor'" in str(outcome.error)


def test_an_open_checkpoint_prints_in_a_line(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors=model(), step=7)
    assert repr(find(tmp_path)) == f"Checkpoint('{tmp_path / 'a'}', step=7, 5 tensors)"
