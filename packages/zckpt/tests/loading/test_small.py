"""Small tensors: read many at once, and each verified by itself."""

from pathlib import Path

import attrs
import pytest
import torch

from zckpt import CheckpointCorrupt, Shard, find, save, whole
from zckpt.loading import small
from zckpt.loading.plan_reads import plan_read
from zckpt.loading.small import find_batches

KINDS = (torch.float32, torch.int64, torch.bfloat16, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn)
FILE = "rank00000.safetensors"


def values() -> dict[str, torch.Tensor]:
    """Neighbours of all sizes and dtypes, some too large to be joined."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for n in range(120):
        dtype = KINDS[n % len(KINDS)]
        shape = [(), (3,), (2, 5), (1000,), (0, 2), (90_000,)][n % 6]
        bits = torch.randint(0, 2 if dtype is torch.bool else 100, (*shape, dtype.itemsize), generator=generator)
        made[f"t{n:03}"] = bits.to(torch.uint8).view(dtype).reshape(shape)
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("verify", [True, False, "first"])
def test_every_tensor_comes_back_whatever_its_neighbours(tmp_path: Path, verify: bool) -> None:
    given = values()
    save(tmp_path, "a", tensors=given)
    live = {name: torch.zeros_like(tensor) for name, tensor in given.items()}
    report = find(tmp_path).read([whole(*each) for each in live.items()], verify=verify)
    assert report.read_nbytes == sum(tensor.nbytes for tensor in given.values())
    for name, tensor in given.items():
        assert bits(live[name]) == bits(tensor), name


def test_some_of_them_converted_and_with_gradients(tmp_path: Path) -> None:
    given = {f"w{n}": torch.rand(5) for n in range(40)}
    save(tmp_path, "a", tensors=given)
    live = {name: torch.zeros(5, dtype=torch.float64, requires_grad=True) for name in sorted(given)[::3]}
    find(tmp_path).read([whole(*each) for each in live.items()], strict=False, cast=True)
    assert all(tensor.detach().equal(given[name].double()) for name, tensor in live.items())


def test_one_tensor_may_be_wanted_twice(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"w": torch.arange(9.0)})
    live = [torch.zeros(9), torch.zeros(9)]
    find(tmp_path).read([whole("w", each) for each in live])
    assert all(each.equal(torch.arange(9.0)) for each in live)


def test_batches_are_neighbours_up_to_a_size_and_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "_BATCH_NBYTES", 1000)
    monkeypatch.setattr(small, "_GAP_NBYTES", 100)
    monkeypatch.setattr(small, "SMALL_NBYTES", 400)
    sizes = {
        "a": 50,
        "b": 50,
        "c": 100,
        "d": 20,
        "e": 5,
        "f": 101,
        "g": 1,
    }  # floats; c is gap enough, and f too large
    save(tmp_path, "a", tensors={name: torch.rand(n) for name, n in sizes.items()})
    wanted = [whole(name, torch.zeros(n)) for name, n in sizes.items() if name != "c"]
    part = Shard("c", (100,), ((0, 100),), (0, 20), torch.zeros(20))
    batches, others = find_batches(plan_read(find(tmp_path).manifest, [*wanted, part], cast=False).items)
    assert [[item.shard.name for item in batch.items] for batch in batches] == [["a", "b"], ["d", "e"], ["g"]]
    assert [item.shard.name for item in others] == ["f", "c"]


def test_a_flip_in_one_of_many_names_it_and_touches_nothing_before_it_is_proved(tmp_path: Path) -> None:
    path = save(tmp_path, "a", tensors={f"w{n:02}": torch.rand(10) for n in range(50)})
    piece = find(tmp_path).manifest.tensors["w31"].pieces[0]
    data = bytearray((path / FILE).read_bytes())
    data[piece.offset + 7] ^= 1
    (path / FILE).write_bytes(data)
    live = {f"w{n:02}": torch.zeros(10) for n in range(50)}
    found = find(tmp_path)
    with pytest.raises(CheckpointCorrupt, match=rf"tensor 'w31' in {FILE} \(bytes [\d,]+ to [\d,]+\): checksum is"):
        found.read([whole(*each) for each in live.items()], verify="first")
    assert not any(tensor.any() for tensor in live.values())
    found.read([whole(name, tensor) for name, tensor in live.items() if name != "w31"], strict=False)
    assert all(tensor.any() for name, tensor in live.items() if name != "w31")


def test_a_part_of_a_verified_one_is_not_hashed_again(tmp_path: Path) -> None:
    save(tmp_path, "a", tensors={"w": torch.arange(1000.0)})
    found = find(tmp_path)
    found.verify()
    found.manifest.tensors["w"] = attrs.evolve(
        found.manifest.tensors["w"],
        pieces=(attrs.evolve(found.manifest.tensors["w"].pieces[0], checksum="0" * 16),),
    )
    live = torch.zeros(10)
    found.read([Shard("w", (1000,), ((0, 1000),), (5, 15), live)])
    assert live.tolist() == list(range(5, 15))
