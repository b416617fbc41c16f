"""A reader written from FORMAT.md alone: json, numpy and xxhash, without code of the package."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

import zckpt
from zckpt.testing import run_threads

SIZES = {"BOOL": 1, "U8": 1, "F8_E4M3": 1, "U16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8, "C64": 8}


def manifest_of(folder: Path) -> dict[str, Any]:
    data = (folder / "manifest.json").read_bytes()
    checksum = xxhash.xxh3_128_hexdigest(data[:-48])
    if data[-48:] != f',"checksum":"{checksum}"}}\n'.encode():
        raise ValueError(f"{folder}: the manifest is damaged")
    told: dict[str, Any] = json.loads(data)
    assert (told["format"], told["version"]) == ("zckpt", 1)
    return told


def committed(root: Path) -> dict[str, tuple[Path, dict[str, Any]]]:
    """Tag -> folder and manifest."""
    found: dict[str, tuple[Path, dict[str, Any]]] = {}
    for name in sorted(os.listdir(root), key=lambda name: not name.startswith(".old-")):
        if not name.startswith(".") or name.startswith(".old-"):
            try:
                told = manifest_of(root / name)
            except (OSError, ValueError):
                continue
            if told["tag"] in (name, name[5:-17]):
                found[told["tag"]] = root / name, told
    return found


def chosen(root: Path) -> tuple[Path, dict[str, Any]]:
    found = committed(root)
    for name in os.listdir(root):
        if name.startswith(".latest-"):
            tag = (root / name).read_text().strip()
            if tag in found and found[tag][1]["attempt"] == name[8:]:
                return found[tag]
    tag = (root / "latest").read_text().strip() if (root / "latest").exists() else ""
    return found.get(tag) or max(found.values(), key=lambda each: (each[1]["step"], each[1]["tag"]))


def read(folder: Path, told: dict[str, Any], name: str) -> bytes:
    """The elements of a tensor, row by row."""
    entry = told["tensors"][name]
    size = SIZES[entry["dtype"]]
    made = np.zeros([*entry["shape"], size], np.uint8)
    for piece in entry["pieces"]:
        with open(folder / piece["file"], "rb") as file:
            header = file.read(told["files"][piece["file"]]["header_bytes"])
            assert xxhash.xxh3_128_hexdigest(header) == told["files"][piece["file"]]["header_xxh3_128"]
            file.seek(piece["offset"])
            data = file.read(piece["bytes"])
        chunks = [data[at : at + piece["chunk_bytes"]] for at in range(0, len(data), piece["chunk_bytes"])]
        assert piece["xxh3_64"] == "".join(map(xxhash.xxh3_64_hexdigest, chunks))
        box = tuple(slice(lo, hi) for lo, hi in piece["box"])
        flat = made[box].reshape(-1, size).copy()
        flat[slice(*piece["span"])] = np.frombuffer(data, np.uint8).reshape(-1, size)
        made[box] = flat.reshape(made[box].shape)
    return made.tobytes()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


WHOLE = {
    "scalar": torch.tensor(3.5),
    "none": torch.empty(0, 3),
    "flags": torch.tensor([True, False]),
    "half": torch.randn(3, 5).bfloat16(),
    "small": torch.randn(9).to(torch.float8_e4m3fn),
    "counts": torch.arange(7).to(torch.uint16),
    "double": torch.randn(2, 2).double(),
    "wave": torch.randn(6, dtype=torch.complex64),
    "number": torch.tensor([-(2**62), 5]),
    "cut@[0:40, 0:9](0:101)": torch.ones(2),
}
CUT = torch.randn(40, 30)


def save(root: Path, tag: str, step: int) -> None:
    """Two tensor-parallel halves of the columns, each of them cut by ZeRO into two: four ranks."""

    def rank(peers: zckpt.Peers) -> None:
        column, part = divmod(peers.rank, 2)
        box = ((0, 40), (0, 9)) if column == 0 else ((0, 40), (9, 30))
        mine = CUT[:, box[1][0] : box[1][1]].reshape(-1)
        span = (0, 101) if part == 0 else (101, mine.numel())
        shards = [zckpt.Shard("cut", (40, 30), box, span, mine[slice(*span)].contiguous())]
        shards += [zckpt.whole(name, tensor) for name, tensor in WHOLE.items()]
        zckpt.save(root, tag, shards=shards, objects={"n": step}, peers=peers, step=step)

    assert [each.error for each in run_threads(rank, 4)] == [None] * 4


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("format")
    save(root, "b", 1)
    save(root, "a", 2)
    return root


def test_what_is_saved_is_read_by_the_description_alone(root: Path) -> None:
    folder, told = chosen(root)
    assert (folder.name, told["objects"], told["world_size"]) == ("a", {"n": 2}, 4)
    for name, tensor in {**WHOLE, "cut": CUT}.items():
        assert told["tensors"][name]["shape"] == list(tensor.shape)
        assert read(folder, told, name) == bytes_of(tensor), name
    assert set(told["tensors"]) == {*WHOLE, "cut"}


def test_both_readers_choose_alike_after_a_crash(root: Path) -> None:
    assert chosen(root)[0].name == zckpt.find(root).tag == "a"
    attempt = manifest_of(root / "b")["attempt"]
    (root / f".latest-{attempt}").write_text("b\n")
    assert chosen(root)[0].name == zckpt.find(root).tag == "b"
    (root / f".latest-{attempt}").rename(root / ".latest-0123456789abcdef")
    assert chosen(root)[0].name == zckpt.find(root).tag == "a"
    (root / "a").rename(root / ".old-a-0123456789abcdef")
    assert chosen(root)[0].name == zckpt.find(root).path.name == ".old-a-0123456789abcdef"
    (root / "latest").unlink()
    assert chosen(root)[1]["tag"] == zckpt.find(root).tag == "a"
