"""Forged manifests have a correct checksum, so the schema must reject them."""

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import xxhash

from zckpt import CheckpointCorrupt
from zckpt.format import schema
from zckpt.format.manifest import FileEntry, Manifest, Piece, TensorEntry, encode
from zckpt.format.regions import Region

PATH = Path("/r/t/manifest.json")
FILE = "rank00000.safetensors"
DOC = Any


def manifest() -> Manifest:
    def piece(key: str, box, span, offset: int, nbytes: int) -> Piece:
        return Piece(FILE, key, Region(box, span), offset, nbytes, 4096, "a" * 16)

    left, right = ((0, 2), (0, 2)), ((0, 2), (2, 3))
    return Manifest(
        tag="t",
        step=3,
        attempt="0123456789abcdef",
        world_size=2,
        tensors={
            "w": TensorEntry(
                torch.float32, (2, 3), (piece("w1", left, (0, 4), 64, 16), piece("w2", right, (0, 2), 80, 8))
            ),
            "s": TensorEntry(torch.int64, (), (piece("s", (), (0, 1), 88, 8),)),
            "empty": TensorEntry(torch.float32, (0, 4), ()),
        },
        files={FILE: FileEntry(96, 64, "b" * 32)},
        objects={"x": {"y": [1, 2.5, None]}},
        rank_objects=({"seed": 1}, {}),
        libraries={"zckpt": "0"},
    )


def forge(doc: DOC) -> bytes:
    """Any document, with a checksum that fits."""
    doc = {key: value for key, value in doc.items() if key != "checksum"}
    return seal(json.dumps(doc).encode())


def seal(text: bytes) -> bytes:
    body = text[:-1]
    return body + f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'.encode()


def document() -> DOC:
    return json.loads(encode(manifest()))


def change(*keys: Any, to: Any) -> Callable[[DOC], None]:
    def apply(doc: DOC) -> None:
        for key in keys[:-1]:
            doc = doc[key]
        doc[keys[-1]] = to

    return apply


def remove(*keys: Any) -> Callable[[DOC], None]:
    def apply(doc: DOC) -> None:
        for key in keys[:-1]:
            doc = doc[key]
        del doc[keys[-1]]

    return apply


def test_what_was_written_is_read() -> None:
    assert schema.decode(encode(manifest()), PATH) == manifest()
    assert schema.decode(forge(document()), PATH) == manifest()
    assert schema.read_summary(encode(manifest()), PATH) == schema.ManifestSummary("t", 3, "0123456789abcdef")


def test_a_manifest_that_is_to_be_written_is_judged_by_its_values() -> None:
    schema.check(manifest(), PATH)
    whole, entry = manifest(), manifest().tensors["w"]
    for change_, words in (
        ({"checksum": "A" * 16}, r"tensors\['w'\].pieces\[1\].*not hex digits"),
        ({"checksum": "a" * 32}, "has 32 digits; 1 chunks have 16"),
        ({"nbytes": 12}, "bytes 12 for 2 elements"),
        ({"offset": 84}, "piece 'w2' begins at byte 84, expected 80"),
        ({"file": "x.safetensors"}, "no file 'x.safetensors'"),
        ({"key": "w1"}, "two pieces have one key"),
    ):
        pieces = entry.pieces[0], attrs.evolve(entry.pieces[1], **change_)
        bad = attrs.evolve(whole, tensors={**whole.tensors, "w": attrs.evolve(entry, pieces=pieces)})
        with pytest.raises(CheckpointCorrupt, match=words) as caught:
            schema.check(bad, PATH)
        assert str(caught.value).startswith(f"{PATH}: ")


PIECE = ("tensors", "w", "pieces", 0)


@pytest.mark.parametrize(
    ("forgery", "words"),
    [
        (change("format", to="other"), '"format": "zckpt"'),
        (change("version", to=2), "version 2, this reader knows up to 1: upgrade"),
        (change("version", to=0), "version: must be an integer from 1"),
        (change("extra", to=1), r"top level: unknown \['extra'\]"),
        (remove("step"), r"top level: missing \['step'\]"),
        (change("step", to=-1), "step: must be an integer from 0"),
        (change("step", to=True), "step: must be an integer.* is True"),
        (change("step", to=1.0), "step: must be an integer.* is 1.0"),
        (change("tag", to="../up"), "tag: '../up'"),
        (change("tag", to=["t"]), "tag: must be a string, is list"),
        (change("attempt", to="x"), "attempt: 'x': is not 16 hex digits"),
        (change("world_size", to=3), "rank_objects: has 2 items for 3 ranks"),
        (change("tensors", to=[]), "tensors: must be an object, is list"),
        (change("tensors", "__metadata__", to={"dtype": "F32", "shape": [0], "pieces": []}), "is reserved"),
        (change("tensors", "w", "dtype", to="F31"), r"tensors\['w'\].dtype: 'F31'"),
        (change("tensors", "w", "shape", to=[10**9, 10**9, 10**9]), "shape: has more than"),
        (change("tensors", "w", "shape", to=[10**18, 0]), "box side|missing|pieces|span|bytes"),
        (change("tensors", "w", "shape", to=[1] * 100), "has 100 dims, at most 64"),
        (change("tensors", "w", "shape", to=[2, 4]), "pieces cover 6 of 8"),
        (change("tensors", "w", "shape", to=[2, 2]), "box side 2:3 of dim 1"),
        (change("tensors", "empty", "shape", to=[4]), "pieces cover 0 of 4"),
        (remove(*PIECE), r"tensors\['w'\].pieces: pieces cover 2 of 6"),
        (change(*PIECE, "span", to=[0, 3]), "bytes 16 for 3 elements"),
        (change(*PIECE, "span", to=[0, 0]), "bytes 16 for 0 elements"),
        (change(*PIECE, "span", to=[0]), "span: must be a pair, has 1"),
        (change(*PIECE, "box", to=[[0, 2]]), "box .* has 1 dims"),
        (change(*PIECE, "box", to=[[0, 2], [1, 3]]), "pieces overlap"),
        (change(*PIECE, "bytes", to=10**18), "bytes 1000000000000000000 for 4 elements"),
        (change(*PIECE, "file", to="other.safetensors"), "no file 'other.safetensors' in files"),
        (change(*PIECE, "key", to="w2"), "two pieces have one key"),
        (change(*PIECE, "offset", to=72), r"piece 'w1' begins at byte 72, expected 64|begins at byte 80, expected"),
        (change(*PIECE, "offset", to=10**19), "offset: must be an integer"),
        (change(*PIECE, "xxh3_64", to="A" * 16), "not hex digits"),
        (change(*PIECE, "xxh3_64", to="a" * 32), "has 32 digits; 1 chunks have 16"),
        (change(*PIECE, "chunk_bytes", to=5000), "5000 is not a power of two from 1,024 to 8,388,608"),
        (change(*PIECE, "chunk_bytes", to=1 << 40), "is not a power of two"),
        (change(*PIECE, "chunk_bytes", to=0), "is not a power of two"),
        (change(*PIECE, "note", to=""), r"unknown \['note'\]"),
        (change("files", FILE, "bytes", to=97), "its pieces end at byte 96, its size is 97"),
        (change("files", FILE, "header_bytes", to=10**15), "begins at byte 64, expected 1,000,000,000,000,000"),
        (change("files", FILE, "header_bytes", to=0), "header_bytes: must be an integer from 8"),
        (change("files", "../x.safetensors", to={}), "must be a plain name"),
        (change("files", "/etc/x.safetensors", to={}), "must be a plain name"),
        (change("files", ".x.safetensors", to={}), "must be a plain name"),
        (change("files", "x.pt", to={}), "must be a plain name"),
        (change("objects", to=1), "objects: must be an object"),
        (change("objects", "x", to=json.loads("[" * 70 + "]" * 70)), r"objects\['x'\].*nested deeper than 64"),
        (change("rank_objects", 1, to=None), r"rank_objects\[1\]: must be an object"),
        (change("libraries", "zckpt", to=1), r"libraries\['zckpt'\]: must be a string"),
    ],
)
def test_a_forged_manifest_is_refused_with_the_place_and_the_reason(
    forgery: Callable[[DOC], None], words: str
) -> None:
    doc = document()
    forgery(doc)
    with pytest.raises(CheckpointCorrupt, match=words) as caught:
        schema.decode(forge(doc), PATH)
    assert str(caught.value).startswith(f"{PATH}: ")
    assert caught.value.path == str(PATH)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "does not end with a checksum: truncated"),
        (encode(manifest())[:-1], "does not end with a checksum"),
        (encode(manifest())[: len(encode(manifest())) // 2], "does not end with a checksum"),
        (encode(manifest()) + b" ", "does not end with a checksum"),
        (encode(manifest()).replace(b'"step":3', b'"step":4'), "checksum is .* damaged or edited"),
        (seal(b"[1]"), "not valid JSON"),
        (seal(b'{"a":NaN}'), "NaN is not JSON"),
        (seal(b'{"format":"zckpt","format":"zckpt"}'), "duplicate key 'format'"),
        (seal(b'{"a":' + b"[" * 100_000 + b"}"), "nested too deeply"),
        (seal(b'{"a":1}'), 'must be an object with "format"'),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, words: str) -> None:
    for read in (schema.decode, schema.read_summary):
        with pytest.raises(CheckpointCorrupt, match=words):
            read(data, PATH)


def test_peek_needs_a_tag_and_a_step() -> None:
    with pytest.raises(CheckpointCorrupt, match="missing 'tag'"):
        schema.read_summary(forge({"format": "zckpt", "version": 1, "step": 1}), PATH)


def mutate(doc: DOC, random_: random.Random) -> None:
    """One random change somewhere in the tree."""
    places = []

    def walk(node: Any) -> None:
        pairs = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in list(pairs):
            places.append((node, key))
            walk(value)

    walk(doc)
    node, key = random_.choice(places)
    values = [None, True, -1, 0, 1, 2**63, 10**18, 1.5, "", "x", "../x", [], {}, [[0, 1]], "0" * 32]
    if random_.random() < 0.2:
        del node[key]
    elif isinstance(node, dict) and random_.random() < 0.2:
        node[random_.choice(["x", "__metadata__", "../a.safetensors"])] = copy.deepcopy(node[key])
    else:
        node[key] = random_.choice(values)


def test_thousands_of_forgeries_raise_nothing_but_the_named_error() -> None:
    random_, accepted = random.Random(0), 0
    for _ in range(1500):
        doc = document()
        for _ in range(random_.randint(1, 3)):
            mutate(doc, random_)
        try:
            schema.decode(forge(doc), PATH)
            accepted += 1
        except CheckpointCorrupt:
            pass
    assert accepted < 300  # changes of objects, libraries or checksums make another legal manifest


def test_entries_of_whole_tensors_are_judged_like_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short way through `_plain_tensor` accepts nothing that the long way rejects, and reads the same."""

    def outcome(data: bytes) -> object:
        try:
            return schema.decode(data, PATH)
        except CheckpointCorrupt as error:
            return str(error)

    random_, seen, real = random.Random(1), [], schema._plain_tensor

    def spy(value: Any) -> Any:
        seen.append(real(value))
        return seen[-1]

    for _ in range(600):
        doc = document()
        whole = {"file": FILE, "key": "w", "box": [[0, 2], [0, 3]], "span": [0, 6], "offset": 64, "bytes": 24}
        doc["tensors"]["w"]["pieces"] = [{**whole, "chunk_bytes": 4096, "xxh3_64": "a" * 16}]
        mutate(doc["tensors"], random_)
        data = forge(doc)
        monkeypatch.setattr(schema, "_plain_tensor", spy)
        short = outcome(data)
        monkeypatch.setattr(schema, "_plain_tensor", lambda value: None)
        assert outcome(data) == short, doc["tensors"]
    assert sum(each is not None for each in seen) > 300
