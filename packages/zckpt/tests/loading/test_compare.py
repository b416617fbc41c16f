import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from zckpt import Checkpoint, Peers, Shard, find, save, whole
from zckpt.loading import compare as comparing
from zckpt.loading.compare import Comparison, Difference, compare
from zckpt.testing import run_threads

NOTHING: Mapping[str, object] = MappingProxyType({})


def saved(root: Path, tag: str, tensors: dict[str, Tensor], objects: Mapping[str, object] = NOTHING) -> Checkpoint:
    save(root, tag, shards=[whole(name, tensor) for name, tensor in tensors.items()], objects=dict(objects))
    return find(root, tag)


def saved_by_two(root: Path, tag: str, values: Tensor) -> Checkpoint:
    """Each rank holds a half of the flattened tensor."""
    cut = values.numel() // 2

    def rank(peers: Peers) -> None:
        span = (0, cut) if peers.rank == 0 else (cut, values.numel())
        box = tuple((0, size) for size in values.shape)
        shard = Shard("w", tuple(values.shape), box, span, values.reshape(-1)[slice(*span)])
        save(root, tag, shards=[shard], objects={}, peers=peers)

    assert [outcome.error for outcome in run_threads(rank, 2)] == [None, None]
    return find(root, tag)


def test_each_kind_of_difference(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {"x": torch.ones(2), "y": torch.ones(2), "z": torch.ones(2), "s": torch.zeros(3)})
    b = saved(
        tmp_path,
        "b",
        {"y": torch.ones(2), "z": torch.ones(2).half(), "s": torch.tensor([0, -2, 1.0]), "q": a.tensor("x")},
    )
    assert compare(a, b) == Comparison(
        only_a=("x",),
        only_b=("q",),
        retyped=("z: float32 (2,) -> float16 (2,)",),
        different=(Difference("s", 3, 2, 2.0),),
        equal=("y",),
        objects=(),
    )
    assert compare(a, a).is_same()
    assert not compare(a, b).is_same(9.0)


def test_any_cut_compares_with_any_other_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "_CHUNK_NBYTES", 64)
    values = torch.rand(7, 11)
    other = values.clone()
    other[6, 10] += 1
    other[0, 0] -= 3
    a, b = saved(tmp_path, "a", {"w": values}), saved_by_two(tmp_path, "b", values)
    assert a.manifest.tensors["w"].pieces != b.manifest.tensors["w"].pieces
    assert compare(a, b).equal == ("w",)
    (found,) = compare(saved_by_two(tmp_path, "c", other), a).different
    assert (found.numel, found.different_numel, round(found.max_abs, 4)) == (77, 2, 3.0)


@pytest.mark.parametrize(
    ("left", "right", "count", "largest"),
    [
        (torch.tensor([math.nan, 1.0]), torch.tensor([math.nan, 1.0]), 0, 0.0),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 1, 0.0),
        (torch.tensor([math.nan, 1.0]), torch.tensor([2.0, 5.0]), 2, math.nan),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1, 1.0),
        (torch.tensor([3, 200], dtype=torch.uint8), torch.tensor([7, 200], dtype=torch.uint8), 1, 4.0),
        (torch.tensor([3 + 4j]), torch.tensor([0j]), 1, 5.0),
        (torch.tensor([1.5]).to(torch.float8_e4m3fn), torch.tensor([2.0]).to(torch.float8_e4m3fn), 1, 0.5),
        (torch.ones(0), torch.ones(0), 0, 0.0),
    ],
)
def test_values_of_all_kinds(tmp_path: Path, left: Tensor, right: Tensor, count: int, largest: float) -> None:
    if left.is_complex():
        left, right = left.to(torch.complex64), right.to(torch.complex64)
    found = compare(saved(tmp_path, "a", {"w": left}), saved(tmp_path, "b", {"w": right}), by_checksum=False)
    assert [each.different_numel for each in found.different] == ([count] if count else [])
    if count:
        assert found.different[0].max_abs == pytest.approx(largest, nan_ok=True)


@pytest.mark.parametrize(
    ("left", "right"),
    [(torch.tensor([0.0]), torch.tensor([-0.0])), (torch.tensor([2**60]), torch.tensor([2**60 + 1]))],
)
def test_other_bits_are_never_the_same_without_a_tolerance(tmp_path: Path, left: Tensor, right: Tensor) -> None:
    found = compare(saved(tmp_path, "a", {"w": left}), saved(tmp_path, "b", {"w": right}))
    assert not found.is_same()
    assert found.is_same(0.5) is left.is_floating_point()
    assert found.is_same(1.0)


def test_equal_checksums_are_believed_unless_asked_otherwise(tmp_path: Path) -> None:
    a, b = (saved(tmp_path, tag, {"w": torch.ones(5)}) for tag in "ab")
    opened: list[Path] = []

    class Watching:
        def __getattr__(self, name: str) -> object:
            opened.append(Path(name))
            return getattr(a.storage, name)

    watched = Checkpoint(b.path, b.manifest, Watching())  # type: ignore[arg-type]
    done: list[int] = []
    assert compare(a, watched, on_progress=done.append).is_same()
    assert (opened, done) == ([], [20])
    assert compare(a, watched, by_checksum=False).is_same()
    assert opened


def test_objects_are_compared_in_depth(tmp_path: Path) -> None:
    a = saved(tmp_path, "a", {}, {"lr": 0.1, "x": {"n": [1, 2], "k": True}, "only": 1, "long": [1] * 9})
    b = saved(tmp_path, "b", {}, {"lr": 0.1, "x": {"n": [1, 3], "k": 1, "new": None}, "long": [1] * 8})
    assert compare(a, b).objects == (
        "long: array of 9 -> array of 8",
        "only: only in A",
        "x.k: True -> 1",
        "x.n[1]: 2 -> 3",
        "x.new: only in B",
    )
