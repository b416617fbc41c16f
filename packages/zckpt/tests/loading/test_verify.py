import random
import shutil
from pathlib import Path

import pytest
import torch

from zckpt import LOCAL, CheckpointCorrupt, CheckpointError, find, open_checkpoint, save, whole
from zckpt.testing import FaultyStorage, ModelStorage

FILE = "rank00000.safetensors"


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(data)


def test_every_flipped_bit_of_a_checkpoint_is_noticed() -> None:
    """Each byte of each file once, by a random bit."""
    storage, random_ = ModelStorage(), random.Random(0)
    save("/r", "a", shards=[whole("w", torch.rand(9)), whole("b", torch.ones(3).bool())], objects={}, storage=storage)
    count = 0
    for name in storage.names(Path("/r/a")):
        file = storage._file(Path("/r/a") / name)
        verified = file.data
        for at in range(len(verified)):
            file.data = verified[:at] + bytes([verified[at] ^ (1 << random_.randrange(8))]) + verified[at + 1 :]
            with pytest.raises(CheckpointError):
                open_checkpoint("/r/a", storage=storage).verify()
            count += 1
        file.data = verified
    assert count > 1000
    open_checkpoint("/r/a", storage=storage).verify()


def test_a_flip_in_a_tensor_names_it_and_its_file(tmp_path: Path) -> None:
    path = save(tmp_path, "a", shards=[whole("w", torch.rand(9)), whole("b", torch.rand(9))], objects={})
    flip(path / FILE, -1)
    live = torch.zeros(9)
    found = find(tmp_path)
    words = rf"tensor 'w' in {FILE} \(bytes [\d,]+ to [\d,]+\): checksum is [0-9a-f]+, the manifest says [0-9a-f]+"
    with pytest.raises(CheckpointCorrupt, match=words):
        found.read([whole("w", live)], strict=False, verify="first")
    assert live.tolist() == [0] * 9
    found.read([whole("b", torch.zeros(9))], strict=False)
    found.read([whole("w", live)], strict=False, verify=False)
    assert live.count_nonzero() == 9
    with pytest.raises(CheckpointCorrupt, match="tensor 'w'"):
        found.verify()


def test_a_flip_in_a_header_names_the_file(tmp_path: Path) -> None:
    path = save(tmp_path, "a", shards=[whole("w", torch.rand(9)), whole("v", torch.rand(9))], objects={})
    flip(path / FILE, 20)
    with pytest.raises(CheckpointCorrupt, match=f"header of {FILE}: checksum is"):
        find(tmp_path).tensor("w")
    with pytest.raises(CheckpointCorrupt) as caught:
        find(tmp_path).verify()
    assert str(caught.value).count("\n") == 0, "one problem, told once"


def test_a_file_of_another_run_with_the_same_shapes_is_named_as_such(tmp_path: Path) -> None:
    paths = [save(tmp_path / run, "a", shards=[whole("w", torch.rand(9))], objects={}) for run in ("x", "y")]
    shutil.copy(paths[1] / FILE, paths[0] / FILE)
    with pytest.raises(CheckpointCorrupt, match=r"header of .*the file is of another save \(tag 'a', attempt"):
        find(tmp_path / "x").tensor("w")


def test_each_piece_is_hashed_once_per_checkpoint_object(tmp_path: Path) -> None:
    save(tmp_path, "a", shards=[whole(name, torch.rand(9)) for name in "xyz"], objects={})
    reads: list[str] = []

    def count(operation: str, path: Path) -> None:
        if operation == "read_into" and path.name == FILE:
            reads.append(operation)

    found = find(tmp_path, storage=FaultyStorage(LOCAL, count))
    found.tensor("x")
    assert len(reads) == 2, "header, piece"
    found.tensor("x")
    assert len(reads) == 3, "piece, and nothing is hashed"
    found.read([whole("y", torch.zeros(9))], strict=False, verify="first")
    assert len(reads) == 5, "piece, and again"
    found.verify()
    assert len(reads) == 6, "the last piece"
    found.verify()
    assert len(reads) == 6


def test_verify_lists_what_is_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, "a", shards=[whole(f"t{i:02d}", torch.rand(2)) for i in range(12)], objects={})
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(data[:-96] + bytes(96))
    with pytest.raises(CheckpointCorrupt) as caught:
        find(tmp_path).verify()
    lines = str(caught.value).splitlines()
    assert [line.split(" in ")[0][-5:] for line in lines[:10]] == [f"'t{i:02d}'" for i in range(10)]
    assert str(caught.value).endswith("... and 2 more")
