"""Quantized tensors: cuts between groups, and plain tensors for files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zprecision as zp

Normal = Callable[..., Tensor]


def test_a_cut_has_the_values_of_the_whole(format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(4, 6, 768), format)
    values = quantized.dequantize()
    assert torch.equal(quantized.narrow(1, 2, 3).dequantize(), values[:, 2:5])
    assert torch.equal(quantized.narrow(-1, 256, 512).narrow(0, 1, 2).dequantize(), values[1:3, :, 256:])
    assert isinstance(quantized, zp.Quantized)


def test_the_last_cut_may_end_with_the_row(format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(3, 600), format)
    assert torch.equal(quantized.narrow(1, 256, 344).dequantize(), quantized.dequantize()[:, 256:])


def test_groups_and_dims_are_not_cut_through(normal: Normal) -> None:
    quantized = zp.quantize(normal(2, 256), zp.Int4(group=64))
    with pytest.raises(ValueError, match=r"narrow\(1, 32, 64\): int4-g64 is cut at multiples of 64 elements"):
        quantized.narrow(1, 32, 64)
    with pytest.raises(ValueError, match=r"narrow\(0, 1, 2\): the dim has 2 elements"):
        quantized.narrow(0, 1, 2)


def test_joined_cuts_are_the_whole(format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(5, 600), format)
    for dim, size, at in ((0, 5, 2), (1, 600, 256)):
        parts = [quantized.narrow(dim, 0, at), quantized.narrow(dim, at, size - at)]
        joined = parts[0].join(parts[1:], dim)
        assert joined.shape == quantized.shape
        assert all(torch.equal(part, quantized.parts()[name]) for name, part in joined.parts().items())
        assert joined.codes.data_ptr() != quantized.codes.data_ptr()


def test_parts_quantized_alone_are_cuts_of_the_whole(format: zp.Format, normal: Normal) -> None:
    values = normal(6, 768)
    whole = zp.quantize(values, format)
    cuts = [(whole.narrow(0, 2, 3), values[2:5])]
    if getattr(format, "group", 0) is not None:  # else a row has one scale
        cuts.append((whole.narrow(1, 256, 512), values[:, 256:].contiguous()))
    for cut, part in cuts:
        alone = zp.quantize(part, format).parts()
        assert all(torch.equal(alone[name], found) for name, found in cut.parts().items())


def test_what_does_not_join_is_named(normal: Normal) -> None:
    one, other = (zp.quantize(normal(2, 96, seed=seed), "int4-row") for seed in (0, 1))
    with pytest.raises(ValueError, match="rows of int4-row have one scale, and these have several"):
        one.join([other], 1)
    with pytest.raises(ValueError, match=r"int4-row of \(2, 96\) and int8-row of \(2, 96\); format and other dims"):
        one.join([zp.quantize(normal(2, 96), "int8-row")])
    with pytest.raises(ValueError, match="a part of 40 elements ends inside a group of 32"):
        zp.quantize(normal(2, 40), "int8").join([zp.quantize(normal(2, 32), "int8")], 1)


@pytest.mark.parametrize("rows", [(0, 32), (16, 21), (16, 5), (3, 20)])
def test_packed_matrices_are_cut_and_joined_like_others(rows: tuple[int, int], normal: Normal) -> None:
    start, length = rows
    quantized = zp.quantize(normal(37, 96), "int4")
    packed = zp.pack(quantized)
    assert isinstance(packed, zp.PackedTensor)
    cut = packed.narrow(0, start, length)
    wanted = quantized.narrow(0, start, length)
    assert cut.shape == (length, 96)
    assert torch.equal(cut.dequantize(), wanted.dequantize())
    assert torch.equal(packed.narrow(-1, 32, 64).dequantize(), quantized.dequantize()[:, 32:])
    parts = [packed.narrow(0, 0, 20), packed.narrow(0, 20, 17)]
    assert torch.equal(parts[0].join(parts[1:]).data, packed.data)
    assert parts[0].join([]).data.data_ptr() != parts[0].data.data_ptr()
    with pytest.raises(ValueError, match="the dim has 37 elements"):
        packed.narrow(0, 30, 8)


def test_plain_tensors_bring_it_back(format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(5, 96).half(), format)
    again = zp.QuantizedTensor.from_state_dict(quantized.narrow(0, 1, 3).state_dict())
    assert (again.format, again.shape, again.dtype) == (format, (3, 96), torch.float16)
    assert torch.equal(again.dequantize(), quantized.dequantize()[1:4])


def header(**changes: Any) -> Tensor:
    text = json.dumps({"format": "int4", "shape": [2, 64], "dtype": "float32"} | changes)
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"header": header(format="int3")}, "damaged: 'int3' names no format"),
        ({"header": header(shape=[2, -64])}, r"the shape \[2, -64\]: it must list integers"),
        ({"header": header(shape=[2, 1 << 62])}, "'codes' of int4 for the shape"),
        ({"header": header(dtype="int8")}, "damaged: 'int8'"),
        ({"header": header()[:-3]}, "damaged"),
        ({"header": torch.zeros(100_000, dtype=torch.uint8)}, "no quantized tensor"),
        ({"codes": torch.zeros(2, 31, dtype=torch.uint8)}, r"'codes' .* must be torch.uint8 of \(2, 32\)"),
        ({"scales": torch.zeros(2, 2)}, r"'scales' .* must be torch.float16"),
        ({"mins": torch.zeros(2, 2)}, r"has the parts \['codes', 'scales'\]"),
    ],
)
def test_damaged_tensors_are_named(changes: dict[str, Tensor], message: str, normal: Normal) -> None:
    state = zp.quantize(normal(2, 64), "int4").state_dict()
    with pytest.raises(ValueError, match=message):
        zp.QuantizedTensor.from_state_dict(state | changes)


def test_packing_is_exact(format: zp.Format, normal: Normal) -> None:
    quantized = zp.quantize(normal(21, 288), format)
    packed = zp.pack(quantized)
    assert torch.equal(packed.dequantize(), quantized.dequantize())
    if isinstance(packed, zp.PackedTensor):
        again = zp.PackedTensor.from_state_dict(packed.state_dict()).unpack()
        assert all(torch.equal(part, again.parts()[name]) for name, part in quantized.parts().items())


def test_packed_tensors_are_checked(normal: Normal) -> None:
    state = zp.pack(zp.quantize(normal(16, 64), "int4")).state_dict()
    with pytest.raises(ValueError, match=r"'panels' of int4 for the shape \(16, 64\) must be uint8 of \(576,\)"):
        zp.PackedTensor.from_state_dict(state | {"panels": torch.zeros(575, dtype=torch.uint8)})
    with pytest.raises(ValueError, match="no packed tensor: q4_k"):
        zp.PackedTensor.from_state_dict(state | {"header": header(format="q4_k")})
    with pytest.raises(ValueError, match=r"a matrix is needed, and the shape is \(2, 3, 64\)"):
        zp.pack(zp.quantize(normal(2, 3, 64), "int4"))


def test_forged_panels_are_copied_and_empty_rows_are_rejected(normal: Normal) -> None:
    packed = zp.pack(zp.quantize(normal(32, 64), "int8"))
    assert isinstance(packed, zp.PackedTensor)
    state = packed.state_dict()
    state["panels"] = torch.zeros(1, dtype=torch.uint8).expand(packed.nbytes)
    again = zp.PackedTensor.from_state_dict(state)
    assert again.data.is_contiguous()
    assert torch.equal(zp.linear(torch.ones(1, 64), again), torch.zeros(1, 32))
    header = json.loads(bytes(state["header"].tolist()))
    forged = torch.frombuffer(bytearray(json.dumps({**header, "shape": [4, 0]}).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"shape \[4, 0\]: its rows are empty"):
        zp.PackedTensor.from_state_dict({"header": forged, "panels": torch.empty(0, dtype=torch.uint8)})
    with pytest.raises(ValueError, match=r"quantize: the tensor is \(4, 0\): its rows are empty"):
        zp.quantize(torch.empty(4, 0), "int4-g32")


@pytest.mark.parametrize("name", ["int8", "int4", "int4-g64-minmax", "int8-row"])
def test_a_matrix_without_rows_is_packed_and_unpacked(name: str) -> None:
    packed = zp.pack(zp.quantize(torch.zeros(0, 192), name))
    assert packed.dequantize().shape == (0, 192)
    assert zp.linear(torch.ones(3, 192), packed).shape == (3, 0)
