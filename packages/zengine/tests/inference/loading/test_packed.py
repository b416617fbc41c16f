"""Packed models: equal to those that were written, and what is said of damaged, foreign and incomplete ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zckpt
from zengine.inference.loading.packed import find_packed, load_packed, save_packed
from zengine.inference.quantized_modules import quantize_linears
from zprecision.quant import Q4_K, Int4, Int8

CPU = torch.device("cpu")
X = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """A tied head, a bias, a layer that stays, and a format without panels."""

    def __init__(self, rows: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.head = nn.Embedding(24, 64), nn.Linear(64, 24, bias=False)
        self.head.weight = self.tokens.weight
        self.up, self.wide, self.down = nn.Linear(64, rows), nn.Linear(rows, 256), nn.Linear(256, 64)
        self.stays = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stays(self.down(torch.relu(self.wide(self.up(x))))))


FORMATS = {"up": Int4(), "wide": Int8(group=None), "down": Q4_K(), "head": Int4(scale="minmax")}


def quantized() -> Model:
    made = Model()
    quantize_linears(made, FORMATS.get)
    return made


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_packed(quantized(), tmp_path / "packed")


def load(path: Path, module: nn.Module | None = None, num_ranks: int = 1) -> nn.Module:
    found = find_packed(path)
    assert found is not None
    made = Model() if module is None else module
    load_packed(made, found, CPU, num_ranks=num_ranks)
    return made


def test_it_comes_back_bit_for_bit(folder: Path) -> None:
    with torch.device("meta"):
        skeleton = Model()
    for made in (load(folder), load(folder, skeleton)):
        assert torch.equal(made(X), quantized()(X))
        assert torch.equal(made.tokens.weight, Model().tokens.weight)
    assert find_packed(folder.parent / "packed" / "rank_0_of_1") is None
    save_packed(quantized(), folder)  # again, in its place


def test_config_and_tokenizer_lie_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "pytorch_model.bin").write_text("large")
    path = save_packed(quantized(), tmp_path / "packed", config={"model_type": "x", "dtype": "half"}, source=source)
    assert json.loads((path / "config.json").read_text()) == {"model_type": "x"}
    assert sorted(each.name for each in path.iterdir()) == ["config.json", "rank_0_of_1", "tokenizer.json"]


def test_ranks_have_parts_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "packed"
    save_packed(quantized(), path, rank=1, num_ranks=2)
    with pytest.raises(ValueError, match="split over 2 ranks, and the parts of 0 are missing: a save"):
        find_packed(path)
    save_packed(quantized(), path, rank=0, num_ranks=2)
    assert torch.equal(load(path, num_ranks=2)(X), quantized()(X))
    with pytest.raises(ValueError, match="was written for 2 tensor-parallel ranks, and this run has 4: start 2"):
        load(path, num_ranks=4)
    with pytest.raises(ValueError, match="holds a model split over 2 ranks: pass an empty or new folder"):
        save_packed(quantized(), path)
    shutil.copytree(path / "rank_0_of_2", path / "rank_0_of_3")
    with pytest.raises(ValueError, match="holds models split over 2 and over 3 ranks"):
        find_packed(path)


def test_damage_is_named(folder: Path) -> None:
    (data,) = (folder / "rank_0_of_1" / "weights").glob("*.safetensors")
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with pytest.raises(zckpt.CheckpointCorrupt, match=data.name):
        load(folder)
    data.write_bytes(content[:-8])
    with pytest.raises(zckpt.CheckpointCorrupt, match="truncated"):
        load(folder)


def test_a_model_of_another_shape_or_with_other_names_is_rejected(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"up has the shape \(40, 64\), the module's \(48, 64\)"):
        load(folder, Model(rows=48))
    other = Model()
    other.more = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"does not fit Model: 2 names differ: more\.bias, more\.weight"):
        load(folder, other)
    del other.more, other.down
    with pytest.raises(ValueError, match=r"does not fit Model: \d names differ: down\."):
        load(folder, other)


def rewrite(folder: Path, change: str, value: Tensor | None, kind: str = "zengine packed model") -> None:
    """Save the tensors again with one of them changed, all checksums right."""
    found = zckpt.find(folder / "rank_0_of_1", "weights")
    tensors = {name: found.tensor(name) for name in found.names()}
    tensors = {name: each for name, each in (tensors | {change: value}).items() if each is not None}
    shards = [zckpt.whole(name, each) for name, each in tensors.items()]
    objects = {**found.objects, "kind": kind}
    zckpt.save(folder / "rank_0_of_1", "weights", shards=shards, objects=objects, overwrite=True)


@pytest.mark.parametrize(
    ("change", "value", "told"),
    [
        ("up.weight.panels", torch.zeros(5, dtype=torch.uint8), "up: 'panels' of int4 for the shape"),
        (
            "up.weight.header",
            torch.tensor([123], dtype=torch.uint8),
            "the header of a quantized tensor is damaged",
        ),
        ("up.weight.header", None, "up: no quantized tensor: it has no 'header'"),
        ("down.weight.mins", None, r"down: q4_k has the parts \['codes', 'mins', 'scales', 'supers'\]"),
        ("more.weight.panels", torch.zeros(5, dtype=torch.uint8), r"1 names differ: more\.weight"),
        ("stays.bias", torch.zeros(3), r"stays\.bias"),
    ],
)
def test_forged_parts_are_named(folder: Path, change: str, value: Tensor | None, told: str) -> None:
    rewrite(folder, change, value)
    with pytest.raises(ValueError, match=told):
        load(folder)


def test_what_is_no_packed_model_is_said(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, "none", None, kind="other")
    with pytest.raises(ValueError, match="is no packed model of this version: kind 'other'"):
        load(folder)
    with pytest.raises(ValueError, match="Model has no quantized layers to write"):
        save_packed(Model(), tmp_path / "new")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("")
    with pytest.raises(ValueError, match=r"holds other files \(mine\.txt\): pass an empty or new folder"):
        save_packed(quantized(), tmp_path / "full")
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is no folder"):
        save_packed(quantized(), tmp_path / "file")
