import torch
import xxhash

from zckpt.format import canonical
from zckpt.format.manifest import FileEntry, Manifest, Piece, TensorEntry, checksum, encode, library_versions
from zckpt.format.regions import Region


def sample(**changes: object) -> Manifest:
    piece = Piece("rank00000.safetensors", "w", Region(((0, 2),), (0, 2)), 64, 8, 4096, "a" * 16)
    fields = {
        "tag": "t",
        "step": 3,
        "attempt": "0123456789abcdef",
        "world_size": 1,
        "tensors": {"w": TensorEntry(torch.float32, (2,), (piece,))},
        "files": {"rank00000.safetensors": FileEntry(72, 64, "b" * 32)},
        "objects": {"x": 1},
        "rank_objects": ({},),
        "libraries": {"zckpt": "0"},
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def test_equal_manifests_have_equal_bytes_and_end_with_the_checksum_of_what_is_before() -> None:
    data = encode(sample())
    assert data == encode(sample())
    body, tail = data[:-48], data[-48:]
    assert tail == f',"checksum":"{xxhash.xxh3_128_hexdigest(body)}"}}\n'[-48:].encode()
    assert data.startswith(b'{"attempt":"0123456789abcdef","files":')


def test_tensors_are_written_as_the_canonical_writer_would() -> None:
    """Their entries are assembled as text."""
    names = ['quote " and \\ back', "umlaut ä €", "emoji \U0001f600", "a\u2028b", "W", "w.10", "w.9", "~", "<a>&'"]
    parts = [Region(((0, 3), (1, 2)), (0, 2)), Region(((0, 3), (2, 3)), (0, 3)), Region((), (0, 1))]
    tensors = {
        name: TensorEntry(
            torch.bfloat16,
            (3, 3),
            tuple(Piece("r.safetensors", f"{name}@{at}", at, 8, 4, 4096, "0" * 16) for at in parts),
        )
        for name in names
    }
    objects = {"x": ',"world_size":5', "world_size": 7, "tensors": {"version": 1}}
    data = encode(sample(tensors={**tensors, "empty": TensorEntry(torch.bool, (0, 4), ())}, objects=objects))
    body = data[:-48] + b"}"
    told = canonical.load(body)
    assert canonical.dump(told) == body
    assert list(told) == sorted(told)
    assert {*told["tensors"]} == {*names, "empty"}
    assert told["tensors"][names[0]]["pieces"][1] == {
        "file": "r.safetensors", "key": f"{names[0]}@{parts[1]}", "box": [[0, 3], [2, 3]], "span": [0, 3],
        "offset": 8, "bytes": 4, "chunk_bytes": 4096, "xxh3_64": "0" * 16,
    }  # fmt: skip
    assert (told["world_size"], told["version"], told["objects"]) == (1, 1, objects)


def test_nbytes_counts_the_files() -> None:
    assert sample().nbytes == 72


def test_the_checksum_is_xxh3_128_in_hex() -> None:
    assert checksum(b"") == "99aa06d3014798d86001c324468d497f"


def test_versions_of_what_wrote_it() -> None:
    assert set(library_versions()) == {"zckpt", "torch", "numpy", "xxhash", "python"}
