import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zckpt import CheckpointCorrupt, CheckpointError, CheckpointInputError, CheckpointMismatch, CheckpointReadError
from zckpt.containers.gguf import read_gguf

TINY = Path(__file__).parents[1] / "fixtures" / "gguf" / "tiny.gguf"


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """shape: in ggml's order, the row first."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf(
    path: Path,
    keys: tuple[bytes, ...] = (),
    infos: tuple[bytes, ...] = (),
    data: bytes = b"",
    alignment: int = 32,
    counts: tuple[int, int] | None = None,
    version: int = 3,
) -> Path:
    num_tensors, num_keys = counts or (len(infos), len(keys))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(keys) + b"".join(infos)
    path.write_bytes(head + bytes(-len(head) % alignment) + data)
    return path


def test_a_file_of_the_gguf_package_is_read() -> None:
    with read_gguf(TINY) as file:
        assert file.metadata["general.architecture"] == "llama"
        assert file.metadata["llama.context_length"] == 64
        assert file.metadata["llama.rope.freq_base"] == 10000.0
        assert file.metadata["tokenizer.ggml.tokens"] == ["a", "é", "zebra"]
        assert file.metadata["tokenizer.ggml.scores"].tolist() == [0.0, -1.5, 2.0]
        described = {name: (each.type_name, each.shape, each.nbytes) for name, each in file.tensors.items()}
        assert described == {
            "token_embd.weight": ("F32", (2, 3), 24),
            "blk.0.Q8_0": ("Q8_0", (2, 64), 2 * 2 * 34),
            "blk.0.Q4_0": ("Q4_0", (2, 64), 2 * 2 * 18),
        }
        assert file.read("token_embd.weight").view(torch.float32).view(2, 3).tolist() == [[0, 1, 2], [3, 4, 5]]
        rows = file.read("blk.0.Q8_0").view(4, 34)
        values = rows[:, :2].contiguous().view(torch.float16) * rows[:, 2:].view(torch.int8)
        assert torch.allclose(values.flatten().float(), torch.linspace(-1, 1, 128), atol=1 / 127)


def test_a_tensor_is_a_view_of_the_file_and_outlives_it(tmp_path: Path) -> None:
    path = gguf(tmp_path / "a.gguf", infos=(info("w", (4,), 0, 0),), data=np.arange(4, dtype="<f4").tobytes())
    with read_gguf(path) as file:
        one, two = file.read("w"), file.read("w")
        assert one.data_ptr() == two.data_ptr()
    path.unlink()
    assert one.view(torch.float32).tolist() == [0, 1, 2, 3]
    one.fill_(7)  # private memory


def test_values_of_every_type_are_read(tmp_path: Path) -> None:
    values: list[tuple[int, str, Any]] = [
        *((0, "B", 200), (1, "b", -3), (2, "H", 60000), (3, "h", -300), (4, "I", 1 << 31), (5, "i", -(1 << 30))),
        *((6, "f", 0.5), (10, "Q", 1 << 63), (11, "q", -(1 << 62)), (12, "d", 0.1), (7, "?", True)),
    ]
    keys = [key(str(kind), kind, struct.pack("<" + code, value)) for kind, code, value in values]
    nested = struct.pack("<IQ", 9, 1) + struct.pack("<IQ", 5, 2) + struct.pack("<ii", 4, 5)
    keys += [key("nested", 9, nested), key("broken", 8, struct.pack("<Q", 1) + b"\xff")]
    keys += [key("flags", 9, struct.pack("<IQ", 7, 2) + b"\x01\x00")]
    with read_gguf(gguf(tmp_path / "a.gguf", keys=tuple(keys), version=2)) as file:
        assert [file.metadata[str(kind)] for kind, _, _ in values] == [value for _, _, value in values]
        (inner,) = file.metadata["nested"]
        assert inner.tolist() == [4, 5]
        assert file.metadata["broken"].encode(errors="surrogateescape") == b"\xff"
        assert file.metadata["flags"].tolist() == [True, False]


def test_the_alignment_of_the_file_holds(tmp_path: Path) -> None:
    keys = (key("general.alignment", 4, struct.pack("<I", 64)),)
    infos = (info("a", (1,), 0, 0), info("b", (1,), 0, 64))
    data = struct.pack("<f60xf", 1.0, 2.0)
    with read_gguf(gguf(tmp_path / "a.gguf", keys, infos, data, alignment=64)) as file:
        assert [file.read(name).view(torch.float32).item() for name in "ab"] == [1, 2]


HUGE = 1 << 60
FORGED = {
    "more tensors": ({"counts": (HUGE, 0)}, "tensors are announced, more than the file has room for"),
    "more keys": ({"counts": (0, HUGE)}, "keys are announced, more than the file has room for"),
    "a long string": ({"keys": (key("k", 8, struct.pack("<Q", HUGE)),)}, "more are announced"),
    "a long array": ({"keys": (key("k", 9, struct.pack("<IQ", 10, HUGE)),)}, "more are announced"),
    "many strings": ({"keys": (key("k", 9, struct.pack("<IQ", 8, HUGE)),)}, "elements are announced"),
    "a long name": ({"keys": (struct.pack("<Q", 1 << 17) + bytes(1 << 17) + bytes(8),)}, "a name of 131,072 bytes"),
    "an unknown value": ({"keys": (key("k", 13, bytes(8)),)}, "a value of type 13"),
    "deep arrays": (
        {"keys": (key("k", 9, struct.pack("<IQ", 9, 1) * 5 + bytes(16)),)},
        "a value of type 9, depth 4",
    ),
    "a key twice": ({"keys": (key("k", 0, b"1"), key("k", 0, b"1"))}, "the key 'k' occurs twice"),
    "a tensor twice": (
        {"infos": (info("w", (), 24, 0), info("w", (), 24, 32)), "data": bytes(64)},
        "'w' occurs twice",
    ),
    "many dims": ({"infos": (info("w", (1,) * 5, 0, 0),)}, "has 5 dims"),
    "beyond the end": ({"infos": (info("w", (8,), 0, 0),), "data": bytes(31)}, "truncated"),
    "a huge shape": ({"infos": (info("w", (HUGE, HUGE), 0, 0),)}, "truncated"),
    "an offset that wraps": ({"infos": (info("w", (1,), 0, (1 << 64) - 32),), "data": bytes(64)}, "truncated"),
    "an odd offset": ({"infos": (info("w", (1,), 0, 3),), "data": bytes(64)}, "no multiple of 32"),
    "half a block": ({"infos": (info("w", (33,), 8, 0),), "data": bytes(99)}, "no multiple of the 32 of Q8_0"),
    "overlap": (
        {"infos": (info("a", (16,), 0, 0), info("b", (8,), 0, 32)), "data": bytes(64)},
        "'a' and 'b' overlap",
    ),
    "alignment 0": ({"keys": (key("general.alignment", 4, bytes(4)),)}, "general.alignment is 0"),
    "alignment 48": ({"keys": (key("general.alignment", 4, b"\x30\0\0\0"),)}, "not a power of two"),
    "alignment in words": ({"keys": (key("general.alignment", 8, text("x")),)}, "not a power of two"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_file_is_named(tmp_path: Path, case: str) -> None:
    made, message = FORGED[case]
    path = gguf(tmp_path / "a.gguf", **made)  # type: ignore[arg-type]
    with pytest.raises(CheckpointCorrupt, match=message) as raised:
        read_gguf(path)
    assert str(path) in str(raised.value)


def test_what_is_not_read_is_named(tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(CheckpointInputError, match=r"no GGUF file: it begins with b'PK"):
        read_gguf(other)
    with pytest.raises(CheckpointInputError, match="version 1; versions 2 and 3"):
        read_gguf(gguf(tmp_path / "a.gguf", version=1))
    with pytest.raises(CheckpointInputError, match="big-endian"):
        read_gguf(gguf(tmp_path / "a.gguf", version=3 << 24))
    with pytest.raises(CheckpointInputError, match=r"'w' has the unknown type 99; known: F32, F16"):
        read_gguf(gguf(tmp_path / "a.gguf", infos=(info("w", (1,), 99, 0),), data=bytes(4)))
    with pytest.raises(CheckpointReadError):
        read_gguf(tmp_path / "absent.gguf")
    with read_gguf(TINY) as file, pytest.raises(CheckpointMismatch, match="no tensor 'w'; it has 3: token_embd"):
        file.read("w")


def test_every_truncated_or_damaged_file_is_read_or_named(tmp_path: Path) -> None:
    whole, draw, path = TINY.read_bytes(), random.Random(0), tmp_path / "a.gguf"
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(draw.randint(0, 4)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data[: draw.choice([len(data), draw.randrange(1, len(data))])])
        assert said_of(path)


def said_of(path: Path) -> str:
    """Read all of a file; return the error that names it, or "read"."""
    try:
        with read_gguf(path) as file:
            total = sum(file.read(name).numel() for name in file.tensors)
    except CheckpointError as error:
        return str(error) if str(path) in str(error) else ""
    return "read" if total <= path.stat().st_size else ""
