"""Codes of other libraries: decoded values against an encoder that writes words bit by bit, in numpy and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from zprecision.quant import GroupedCodes, format_name, pack, read_awq, read_compressed, read_gptq

np: Any = pytest.importorskip("numpy")

OUT, IN = 24, 256
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def draw(bits: int, groups: int, *, symmetric: bool, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes (OUT, IN), zeros (OUT, groups) and scales (OUT, groups) float16."""
    rng = np.random.default_rng(seed)
    top = 1 << (bits - 1)
    zeros = np.full((OUT, groups), top) if symmetric else rng.integers(1, 2 * top, (OUT, groups))
    scales = rng.uniform(0.001, 0.1, (OUT, groups)).astype(np.float16)
    return rng.integers(0, 2 * top, (OUT, IN)), zeros, scales


def words(values: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Pack codes along an axis into int32, one by one; order: the element of each place of a word."""
    per_word = 32 // bits
    moved = np.moveaxis(values, axis, -1)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per_word)])
    found = np.zeros((*moved.shape[:-1], moved.shape[-1] // per_word), dtype=np.uint32)
    for word in range(found.shape[-1]):
        for place in range(per_word):
            element = place if order is None else order[place]
            found[..., word] |= moved[..., word * per_word + element].astype(np.uint32) << np.uint32(bits * place)
    return torch.from_numpy(np.moveaxis(found, -1, axis).copy().view(np.int32))


def values(codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, index: np.ndarray) -> Tensor:
    """The rule, in float64."""
    wide = (codes.astype(np.float64) - zeros[:, index]) * scales.astype(np.float64)[:, index]
    return torch.from_numpy(wide)


def regular(groups: int) -> np.ndarray:
    return np.arange(IN) // (IN // groups)


def gptq(bits: int, codes: np.ndarray, zeros: np.ndarray, scales: np.ndarray, offset: int = 1) -> dict[str, Tensor]:
    stored = (zeros - offset) % (1 << bits)
    return {
        "qweight": words(codes.T, bits, axis=0),
        "qzeros": words(stored.T, bits, axis=1),
        "scales": torch.from_numpy(scales.T.copy()),
    }


def check(found: GroupedCodes, wanted: Tensor) -> None:
    """The values are those of float64, rounded once, in float32 and in float16."""
    assert torch.equal(found.dequantize(), wanted.float())
    assert torch.equal(found.dequantize().double(), wanted), "float32 is exact"
    assert torch.equal(found.dequantize(torch.float16), wanted.half())
    kept = found.to_quantized()
    if kept is not None:
        assert torch.equal(kept.dequantize(torch.float32), wanted.float())
        assert torch.equal(pack(kept).dequantize(torch.float32), wanted.float())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("groups", [2, 1, 8, 16])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("offset", [0, 1])
def test_gptq_is_decoded_exactly(bits: int, groups: int, symmetric: bool, offset: int) -> None:
    codes, zeros, scales = draw(bits, groups, symmetric=symmetric)
    parts = gptq(bits, codes, zeros, scales, offset)
    group = None if groups == 1 else IN // groups
    found = read_gptq(parts, bits=bits, group=group, zero_offset=offset)
    assert found.shape == (OUT, IN)
    check(found, values(codes, zeros, scales, regular(groups)))


def test_a_zero_of_nothing_wraps_around() -> None:
    codes, zeros, scales = draw(4, 2, symmetric=False)
    zeros[:] = 0  # stored as 15
    found = read_gptq(gptq(4, codes, zeros, scales), bits=4, group=IN // 2)
    check(found, values(codes, zeros, scales, regular(2)))


def test_the_order_of_activations_is_followed() -> None:
    codes, zeros, scales = draw(4, 4, symmetric=True)
    index = np.random.default_rng(1).permutation(regular(4))
    parts = gptq(4, codes, zeros, scales) | {"g_idx": torch.from_numpy(index.astype(np.int32))}
    found = read_gptq(parts, bits=4, group=64)
    check(found, values(codes, zeros, scales, index))
    assert found.to_quantized() is None
    rows = found.narrow(0, 3, 5)
    assert torch.equal(rows.dequantize(), found.dequantize()[3:8])
    parts["g_idx"] = torch.from_numpy(regular(4).astype(np.int32))
    kept = read_gptq(parts, bits=4, group=64).to_quantized()
    assert kept is not None
    assert format_name(kept.format) == "int4-g64"


@pytest.mark.parametrize("groups", [2, 1])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_is_decoded_exactly(groups: int, symmetric: bool) -> None:
    codes, zeros, scales = draw(4, groups, symmetric=symmetric)
    parts = {
        "qweight": words(codes.T, 4, axis=1, order=ORDER),
        "qzeros": words(zeros.T, 4, axis=1, order=ORDER),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    found = read_awq(parts, group=None if groups == 1 else IN // groups)
    check(found, values(codes, zeros, scales, regular(groups)))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("groups", "stored"), [(2, None), (1, None), (2, "packed"), (1, "int8"), (8, "packed")])
def test_compressed_tensors_are_decoded_exactly(
    bits: int, dtype: torch.dtype, groups: int, stored: str | None
) -> None:
    codes, zeros, scales = draw(bits, groups, symmetric=stored is None)
    given = torch.from_numpy(scales).to(dtype)
    scales = given.double().numpy()
    parts: dict[str, Tensor] = {"weight_packed": words(codes, bits, axis=1), "weight_scale": given}
    if stored == "packed":
        parts["weight_zero_point"] = words(zeros, bits, axis=0)
    elif stored == "int8":
        parts["weight_zero_point"] = torch.from_numpy((zeros - (1 << (bits - 1))).astype(np.int8))
    found = read_compressed(parts, bits=bits, shape=(OUT, IN))
    wanted = values(codes, zeros, scales, regular(groups))
    assert torch.equal(found.dequantize().double(), wanted)
    assert torch.equal(found.dequantize(dtype), wanted.to(dtype))
    kept = found.to_quantized()
    if kept is not None:
        assert torch.equal(kept.dequantize(torch.float32).double(), wanted)


def test_compressed_groups_in_another_order_and_one_scale_for_all() -> None:
    codes, zeros, scales = draw(4, 4, symmetric=True)
    index = np.random.default_rng(2).permutation(regular(4))
    parts = {"weight_packed": words(codes, 4, axis=1), "weight_scale": torch.from_numpy(scales)}
    found = read_compressed(parts | {"weight_g_idx": torch.from_numpy(index)}, bits=4, shape=(OUT, IN))
    check(found, values(codes, zeros, scales, index))
    unused = parts | {"weight_g_idx": torch.full((IN,), -1)}
    check(read_compressed(unused, bits=4, shape=(OUT, IN)), values(codes, zeros, scales, regular(4)))
    one = parts | {"weight_scale": torch.tensor([0.5])}
    wanted = torch.from_numpy((codes - 8) * 0.5)
    assert torch.equal(read_compressed(one, bits=4, shape=(OUT, IN)).dequantize().double(), wanted)


def test_codes_are_kept_in_the_narrowest_format_that_is_exact() -> None:
    def kept(bits: int, groups: int, zeros: Any, scales: Any = None) -> str:
        codes, _, drawn = draw(bits, groups, symmetric=True)
        scales = drawn if scales is None else np.broadcast_to(np.asarray(scales), drawn.shape)
        found = GroupedCodes(
            bits=bits,
            codes=torch.from_numpy(codes.astype(np.uint8)),
            scales=torch.from_numpy(scales.copy()),
            zeros=torch.from_numpy(np.broadcast_to(np.asarray(zeros), drawn.shape).astype(np.int16).copy()),
        ).to_quantized()
        return "" if found is None else format_name(found.format)

    assert kept(4, 2, 8) == "int4-g128"
    assert kept(4, 8, 8) == "int4"
    assert kept(4, 1, 8) == "int4-row"
    assert kept(8, 4, 128) == "int8-g64"
    assert kept(4, 2, 5, np.float16(0.25)) == "int4-g128-minmax", "0.25 * 5 is a float16"
    assert kept(4, 2, 5, np.float16(0.1)) == "int8-g128"
    assert kept(8, 2, 3) == "", "the differences have nine bits"
    assert kept(4, 16, 8) == "", "groups of 16"
    assert kept(4, 2, 8, np.float32(0.1)) == "", "no float16"
    assert kept(4, 1, 8, np.float32(0.1)) == "int4-row", "one scale a row is a float32"


GOOD = gptq(4, *draw(4, 2, symmetric=True))
FORGED: dict[str, tuple[dict[str, Any], str]] = {
    "no scales": ({"scales": None}, "'scales' is missing"),
    "scales of integers": ({"scales": torch.ones(2, OUT, dtype=torch.int32)}, "'scales' must be torch.float16 or"),
    "scales of another shape": ({"scales": torch.ones(3, OUT).half()}, r"of \(2, 24\), and is .* of \(3, 24\)"),
    "zeros of another shape": ({"qzeros": torch.ones(2, 2, dtype=torch.int32)}, r"'qzeros' must be .* \(2, 3\)"),
    "codes of floats": ({"qweight": torch.ones(32, OUT)}, "'qweight' must be torch.int32"),
    "codes of one dim": ({"qweight": torch.ones(32, dtype=torch.int32)}, r"'qweight' must be a matrix, and is \(32,"),
    "no codes": ({"qweight": torch.ones(0, OUT, dtype=torch.int32)}, "'qweight' must be a matrix"),
    "a group that is not there": ({"g_idx": torch.full((IN,), 2, dtype=torch.int32)}, "names groups from 2 to 2"),
    "a negative group": ({"g_idx": torch.full((IN,), -1, dtype=torch.int32)}, "names groups from -1"),
    "groups of a few inputs": ({"g_idx": torch.zeros(5, dtype=torch.int32)}, r"'g_idx' must be .*\(256,\)"),
}


@pytest.mark.parametrize("case", FORGED)
def test_forged_parts_are_named(case: str) -> None:
    changed, told = FORGED[case]
    parts = {name: part for name, part in (GOOD | changed).items() if part is not None}
    with pytest.raises(ValueError, match=told):
        read_gptq(parts, bits=4, group=128)


def test_other_widths_and_zeros_are_named() -> None:
    with pytest.raises(ValueError, match="3 bits: 4 and 8 are read"):
        read_gptq(GOOD, bits=3, group=128)
    parts = {"weight_packed": torch.zeros(OUT, IN // 8, dtype=torch.int32), "weight_scale": torch.ones(OUT, 3)}
    with pytest.raises(ValueError, match="'weight_scale' has 3 groups for 256 inputs"):
        read_compressed(parts, bits=4, shape=(OUT, IN))
    parts |= {"weight_scale": torch.ones(OUT, 1), "weight_zero_point": torch.full((OUT, 1), 9, dtype=torch.int8)}
    with pytest.raises(ValueError, match="'weight_zero_point' has values outside of 4 bits"):
        read_compressed(parts, bits=4, shape=(OUT, IN))
    with pytest.raises(ValueError, match=r"'weight_packed' must be torch.int32 of \(24, 64\)"):
        read_compressed(parts, bits=8, shape=(OUT, IN))
    with pytest.raises(ValueError, match=r"narrow\(1, ...\): only rows"):
        read_gptq(GOOD, bits=4, group=128).narrow(1, 0, 32)
