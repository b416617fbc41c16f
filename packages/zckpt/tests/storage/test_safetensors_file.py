from pathlib import Path

import pytest
import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file

from zckpt import CheckpointInputError
from zckpt.format import canonical, safetensors_layout
from zckpt.format.chunks import chunk_nbytes
from zckpt.format.regions import Region, whole_box
from zckpt.format.safetensors_layout import _NAMES, TensorPart, place_parts
from zckpt.storage import safetensors_file as safefile
from zckpt.storage.safetensors_file import host_chunks, read_metadata
from zckpt.storage.storage import LOCAL


def part(name: str, dtype: torch.dtype, shape: tuple[int, ...], box=None, span=None) -> TensorPart:
    numel = 1
    for lo, hi in box or whole_box(shape):
        numel *= hi - lo
    return TensorPart(name, dtype, shape, Region(box or whole_box(shape), span or (0, numel)))


def write(path: Path, parts: list[TensorPart], tensors: list[torch.Tensor]) -> list[str]:
    with LOCAL.create(path) as writer:
        return safefile.write(writer, place_parts(parts, {"format": "pt", "who": "me"}), tensors)


def test_the_safetensors_library_reads_every_dtype(tmp_path: Path) -> None:
    dtypes = sorted(_NAMES, key=lambda dtype: -dtype.itemsize)
    tensors = [torch.arange(6, dtype=torch.uint8).repeat(8)[: 6 * d.itemsize].clone() for d in dtypes]
    tensors = [(t % 2 if d is torch.bool else t).view(d) for t, d in zip(tensors, dtypes)]
    write(tmp_path / "f.safetensors", [part(str(d), d, (2, 3)) for d in dtypes], tensors)
    for name, loaded in load_file(tmp_path / "f.safetensors").items():
        dtype = next(d for d in dtypes if str(d) == name)
        assert (loaded.dtype, loaded.shape) == (dtype, (2, 3))
        mine = tensors[dtypes.index(dtype)]
        assert loaded.reshape(-1).view(torch.uint8).equal(mine.view(torch.uint8))


def test_parts_keep_their_box_shape_and_are_named_after_their_region(tmp_path: Path) -> None:
    parts = [
        part("w", torch.float32, (4, 3)),
        part("w", torch.float32, (4, 3), ((0, 2), (0, 3))),
        part("w", torch.float32, (4, 3), ((2, 4), (0, 3)), (1, 5)),
        part("s", torch.float32, ()),
        part("w@[0:2, 0:3](0:6)", torch.float32, (1,)),
    ]
    write(tmp_path / "f.safetensors", parts, [torch.ones(p.region.numel) for p in parts])
    with safe_open(tmp_path / "f.safetensors", framework="pt") as opened:
        shapes = {key: tuple(opened.get_slice(key).get_shape()) for key in opened.keys()}  # noqa: SIM118
        assert opened.metadata() == {"format": "pt", "who": "me"}
    assert shapes == {
        "w": (4, 3),
        "w@[0:2, 0:3](0:6)": (2, 3),
        "w@[2:4, 0:3](1:5)": (4,),
        "s": (),
        "w@[0:2, 0:3](0:6)~": (1,),
    }


def test_layout_says_where_each_part_begins_and_where_the_file_ends(tmp_path: Path) -> None:
    parts = [part("a", torch.float64, (3,)), part("b", torch.int16, (5,)), part("c", torch.bool, (1,))]
    layout = place_parts(parts, {})
    tensors = [
        torch.rand(3, dtype=torch.float64),
        torch.arange(5, dtype=torch.int16),
        torch.ones(1, dtype=torch.bool),
    ]
    with LOCAL.create(tmp_path / "f") as writer:
        checksums = safefile.write(writer, layout, tensors)
    data = (tmp_path / "f").read_bytes()
    assert len(data) == layout.nbytes
    assert len(layout.header) % 8 == 0
    for p, offset, tensor, checksum in zip(parts, layout.offsets, tensors, checksums):
        assert offset % p.dtype.itemsize == 0
        assert data[offset : offset + p.nbytes] == tensor.view(torch.uint8).numpy().tobytes()
        assert checksum == xxhash.xxh3_64_hexdigest(data[offset : offset + p.nbytes])


def test_the_header_is_what_the_canonical_writer_would_write() -> None:
    names = ['quote " and \\', "ä", "W", "__metadata__2", "w.10", "w.9"]
    parts = [part(name, torch.float32, (2, 3)) for name in names]
    parts.append(part("w", torch.float32, (4, 3), ((2, 4), (0, 3)), (1, 5)))
    header = place_parts(parts, {"b": "2", "a": '"'}).header
    assert len(header) % 8 == 0
    told = canonical.load(header[8:])
    assert canonical.dump(told) == header[8:].rstrip(b" ")
    assert told["w@[2:4, 0:3](1:5)"] == {"dtype": "F32", "shape": [4], "data_offsets": [144, 160]}
    assert told["__metadata__"] == {"a": '"', "b": "2"}


def test_small_neighbours_are_written_together_with_the_bytes_and_checksums_of_each(tmp_path: Path) -> None:
    class Counting:
        def __init__(self, path: Path) -> None:
            self.inner, self.sizes = LOCAL.create(path), []

        def write(self, data: memoryview) -> None:
            self.sizes.append(len(data))
            self.inner.write(data)

        def sync(self) -> None:
            self.inner.sync()

    sizes = [3, 70_000, 5, 1, 2, 4096, 300_000, 7]
    tensors = [torch.rand(n) for n in sizes]
    tensors[3] = torch.view_as_complex(torch.rand(2)).conj().imag.reshape(1)  # its values are negated when read
    assert tensors[3].is_neg()
    layout = place_parts([part(f"t{i}", torch.float32, (n,)) for i, n in enumerate(sizes)], {})
    writer = Counting(tmp_path / "f")
    checksums = safefile.write(writer, layout, tensors)  # type: ignore[arg-type]
    assert len(writer.sizes) < 20
    assert {4 * 3, 4 * (5 + 1 + 2 + 4096), 4 * 7} < set(writer.sizes)  # no large one is copied to join them
    data = (tmp_path / "f").read_bytes()
    for tensor, start, checksum in zip(tensors, layout.offsets, checksums):
        stored = data[start : start + tensor.nbytes]
        assert stored == tensor.resolve_neg().numpy().tobytes()
        chunk = chunk_nbytes(tensor.nbytes)
        assert checksum == "".join(
            xxhash.xxh3_64_hexdigest(stored[at : at + chunk]) for at in range(0, len(stored), chunk)
        )


def test_chunks_are_the_bytes_in_order_without_a_copy() -> None:
    tensor = torch.arange(1000, dtype=torch.bfloat16)
    chunks = [bytes(chunk) for chunk in host_chunks(tensor, 300)]
    assert [len(chunk) for chunk in chunks] == [300] * 6 + [200]
    assert b"".join(chunks) == tensor.view(torch.uint8).numpy().tobytes()
    first = next(host_chunks(tensor))
    tensor[0] = 7
    assert bytes(first[:2]) == torch.tensor([7], dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_conjugate_views_are_written_as_their_values() -> None:
    tensor = torch.tensor([1 + 2j], dtype=torch.complex64)
    assert (
        b"".join(map(bytes, host_chunks(tensor.conj()))) == tensor.conj_physical().view(torch.uint8).numpy().tobytes()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_tensor_comes_over_piece_by_piece() -> None:
    tensor = torch.rand(1000, device="cuda")
    assert (
        b"".join(bytes(chunk) for chunk in host_chunks(tensor, 256))
        == tensor.cpu().view(torch.uint8).numpy().tobytes()
    )


def test_a_header_too_large_for_other_readers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_layout, "_MAX_HEADER_NBYTES", 100)
    with pytest.raises(CheckpointInputError, match="need a header of"):
        place_parts([part("a" * 100, torch.float32, (1,))], {})


@pytest.mark.parametrize(
    "data",
    [b"", b"1234567", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{}", b"\x02" + b"\0" * 7 + b"[]", b"\x05" + b"\0" * 7],
)
def test_metadata_of_a_file_that_makes_no_sense_is_empty(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    with LOCAL.open(tmp_path / "f") as reader:
        assert read_metadata(reader) == {}
