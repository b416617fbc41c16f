import struct
import zipfile
from pathlib import Path

import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointReadError
from zckpt.containers.zipmap import ZipMap


def archive(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, data in members.items():
            file.writestr(name, data)
    return path


def test_what_torch_saves_is_mapped_and_not_copied(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"w": torch.arange(1000.0)}, path)
    with ZipMap.open(path) as opened:
        one, two = (opened.tensor("data/0", torch.float32, 1000) for _ in range(2))
        assert one.data_ptr() == two.data_ptr()
        assert torch.equal(one, torch.arange(1000.0))
        one[0] = 7  # private memory: the file stays as it is
        assert opened.tensor("data/0", torch.float32, 1)[0] == 7
    assert torch.load(path, weights_only=True)["w"][0] == 0


def test_a_tensor_outlives_the_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.arange(10), path)
    with ZipMap.open(path) as opened:
        tensor = opened.tensor("data/0", torch.int64, 10)
    path.unlink()
    assert tensor.sum() == 45


def test_a_member_that_is_not_aligned_is_copied(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", {"a/x": b"z" * 3, "a/data/0": torch.arange(4.0).numpy().tobytes()})
    with ZipMap.open(path) as opened:
        assert opened.member("data/0").start % 4, "the test needs another length of x"
        one, two = (opened.tensor("data/0", torch.float32, numel) for numel in (4, 2))
        assert one.tolist() == [0, 1, 2, 3]
        assert one.data_ptr() == two.data_ptr(), "a file that refers to it a million times has one copy"


@pytest.mark.parametrize("name", ["/etc/passwd", "a/../../b", "a//b", "plain", "a/.", "a\\..\\b/c"])
def test_names_that_lead_elsewhere_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointCorrupt, match="has an invalid name"):
        ZipMap.open(archive(tmp_path / "a.pt", {name: b"x"}))


def test_a_bomb_is_refused_before_anything_is_inflated(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", {"a/data/0": bytes(10_000_000)}, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 100_000
    with pytest.raises(CheckpointCorrupt, match=r"is compressed .* bytes for 10,000,000"):
        ZipMap.open(path)


def _patched(path: Path, at: int, form: str, *values: int) -> Path:
    data = bytearray(path.read_bytes())
    struct.pack_into(form, data, at, *values)
    path.write_bytes(data)
    return path


def test_sizes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", {"a/data/0": bytes(64)})
    central = path.read_bytes().index(b"PK\x01\x02")
    _patched(path, central + 20, "<LL", 1 << 30, 1 << 30)
    with pytest.raises(CheckpointCorrupt, match="outside the file"):
        ZipMap.open(path)


def test_members_that_overlap_are_refused(tmp_path: Path) -> None:
    path = archive(tmp_path / "a.pt", {"a/data/0": bytes(64), "a/data/1": bytes(64)})
    data = path.read_bytes()
    second = data.index(b"PK\x01\x02", data.index(b"PK\x01\x02") + 4)
    with pytest.raises(CheckpointCorrupt, match="overlap"):
        ZipMap.open(_patched(path, second + 42, "<L", 0))  # both begin at the first header


def test_a_member_is_not_read_past_its_end(tmp_path: Path) -> None:
    with ZipMap.open(archive(tmp_path / "a.pt", {"a/data/0": bytes(64)})) as opened:
        with pytest.raises(CheckpointCorrupt, match=r"64 bytes, too few for 17 elements of torch\.float32"):
            opened.tensor("data/0", torch.float32, 17)
        with pytest.raises(CheckpointCorrupt, match="no member 'data/1'"):
            opened.tensor("data/1", torch.float32, 1)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.zeros(1000), path)
    with ZipMap.open(path) as opened:
        opened.verify()
        at = opened.member("data/0").start + 2000
    _patched(path, at, "<B", 1)
    with ZipMap.open(path) as opened, pytest.raises(CheckpointCorrupt, match="'data/0': its checksum differs"):
        opened.verify()


@pytest.mark.parametrize("keep", [0, 1, 100, 0.5, 0.99])
def test_a_truncated_file_is_named(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.zeros(1000), path)
    data = path.read_bytes()
    path.write_bytes(data[: int(keep if keep >= 1 or not keep else keep * len(data))])
    with pytest.raises(CheckpointCorrupt, match=r"a\.pt"):
        ZipMap.open(path)


def test_the_format_before_zip_is_told_apart(tmp_path: Path) -> None:
    torch.save(torch.zeros(2), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(CheckpointCorrupt, match="bare pickle"):
        ZipMap.open(tmp_path / "old.pt")


def test_what_cannot_be_read_is_a_read_error(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.pt", tmp_path):
        with pytest.raises(CheckpointReadError, match=str(path)):
            ZipMap.open(path)
