"""The formats in torch: against plain integer arithmetic, against the C text bit for bit, and in their properties."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from zoptim.states import formats
from zoptim.states.formats import StateFormat

MASK = 0xFFFFFFFF
BLOCK = 256


def mixed_values(numel: int = 60_001) -> Tensor:
    """float32 of every kind: random bits (subnormal, infinite and quiet NaN among them) and numbers near 1."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    near = torch.randn(numel, generator=generator)
    return torch.cat([torch.where(values.isnan(), torch.nan, values), near, torch.zeros(300), -torch.zeros(300)])


def finite_values() -> Tensor:
    values = mixed_values()
    return values[values.isfinite()]


def bits_of(value: float) -> int:
    found: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return found


def int_bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def mix_by_hand(x: int) -> int:
    x = x * 0x7FEB352D & MASK
    x ^= x >> 15
    return x * 0x846CA68B & MASK


# Names ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "member"),
    [
        *[(name, StateFormat.FP32) for name in ("fp32", "float32", "FP32", torch.float32)],
        *[(name, StateFormat.BF16) for name in ("bf16", "bfloat16", "BFloat16", torch.bfloat16)],
        *[(name, StateFormat.FP16) for name in ("fp16", "float16", torch.float16)],
        *[(name, StateFormat.INT8) for name in ("8bit", "int8", "uint8", "8Bit")],
        (StateFormat.BF16, StateFormat.BF16),
        (None, None),
    ],
    ids=str,
)
def test_a_state_format_is_named_by_text_or_dtype_in_any_case(given: object, member: StateFormat | None) -> None:
    assert StateFormat.parse(given) is member


@pytest.mark.parametrize("given", ["fp8", "", 16, 8, torch.float64, True, ["bf16"], ("fp32",)], ids=str)
def test_an_unknown_state_format_raises_with_the_allowed_ones(given: object) -> None:
    with pytest.raises(ValueError, match=r"state_dtype is .*None .*\"fp32\", \"bf16\", \"fp16\", \"8bit\""):
        StateFormat.parse(given)


def test_bytes_per_element_are_those_of_the_tensors() -> None:
    assert {member.value: member.bytes_per_element for member in StateFormat} == {
        "fp32": 4,
        "bf16": 2,
        "fp16": 2,
        "8bit": 1 + 4 / 256,
    }
    codes, scales = formats.encode_signed(torch.randn(10 * BLOCK))
    stored = codes.numel() * codes.element_size() + scales.numel() * scales.element_size()
    assert stored == 10 * BLOCK * StateFormat.INT8.bytes_per_element
    assert codes.dtype is StateFormat.INT8.dtype


# Noise ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [0, 1, 2, 77, 2**31, 2**32 - 1])
@pytest.mark.parametrize("stream", [0, 1, 2, 3])
def test_a_seed_is_the_hash_of_step_and_stream(step: int, stream: int) -> None:
    mixed = mix_by_hand(step * 0x9E3779B9 + stream * 0x85EBCA6B + 1 & MASK)
    assert formats.seed_of(step, stream) == mixed ^ mixed >> 16


def test_seeds_of_neighbouring_steps_and_streams_are_far_apart() -> None:
    seeds = [formats.seed_of(step, stream) for step in range(2000) for stream in range(4)]
    assert len(set(seeds)) == len(seeds)
    ones = [bin(a ^ b).count("1") for a, b in itertools.pairwise(seeds)]
    assert sum(ones) / len(ones) == pytest.approx(16, abs=0.5)


def test_stochastic_bf16_adds_the_hash_of_the_value_and_truncates() -> None:
    values, seed = mixed_values(500), formats.seed_of(5, 1)
    expected = []
    for value in values.tolist():
        bits = bits_of(value)
        noise = 0 if bits << 1 & MASK > 0xFF000000 else mix_by_hand(bits ^ seed) >> 16
        expected.append((bits + noise & MASK) >> 16)
    found = formats.to_bf16_stochastic(values, seed).view(torch.int16).long() & 0xFFFF
    finite = ~values.isnan()
    assert torch.equal(found[finite], torch.tensor(expected)[finite])
    assert bool(formats.to_bf16_stochastic(values, seed)[~finite].isnan().all())


# Against C --------------------------------------------------------------------------------------------

F32, BF16, F16, SPLIT, Q8 = range(1, 6)
WEIGHT, SIGNED, SQUARE = range(3)  # kinds of stream
CODES = {BF16: torch.bfloat16, SPLIT: torch.bfloat16, Q8: torch.uint8}


class C:
    """zk_encode and zk_decode on tensors."""

    def __init__(self) -> None:
        module: Any = pytest.importorskip("zoptim._kernels")
        self.ffi, self.lib = module.ffi, module.lib

    def address(self, tensor: Tensor) -> Any:
        return self.ffi.cast("void *", tensor.data_ptr())

    def encode(self, form: int, kind: int, values: Tensor, seed: int | None) -> tuple[Tensor, Tensor]:
        codes = torch.zeros(values.numel(), dtype=CODES[form])
        low = torch.zeros(values.numel(), dtype=torch.int16)
        extra = low if form == SPLIT else torch.zeros(-(-values.numel() // BLOCK))
        to, source = self.address(codes), self.ffi.cast("float *", values.data_ptr())
        tail = (values.numel(), seed or 0, seed is not None)
        self.lib.zk_encode(form, kind, source, to, self.address(extra), *tail)
        return codes, extra

    def decode(self, form: int, kind: int, codes: Tensor, extra: Tensor) -> Tensor:
        values = torch.zeros(codes.numel())
        to = self.ffi.cast("float *", values.data_ptr())
        self.lib.zk_decode(form, kind, self.address(codes), self.address(extra), to, codes.numel())
        return values


SEEDS = [None, 0, 1, 0xDEADBEEF, MASK]


@pytest.mark.parametrize("seed", SEEDS[1:])
def test_stochastic_bf16_is_that_of_the_kernels(seed: int) -> None:
    values = mixed_values()
    codes, _ = C().encode(BF16, SIGNED, values, seed)
    assert torch.equal(int_bits(formats.to_bf16_stochastic(values, seed)), int_bits(codes))


def test_a_split_master_is_that_of_the_kernels() -> None:
    values = mixed_values()
    high, low = formats.split(values)
    expected = C().encode(SPLIT, WEIGHT, values, None)
    assert torch.equal(int_bits(high), int_bits(expected[0]))
    assert torch.equal(low, expected[1])
    assert torch.equal(int_bits(formats.join(high, low)), int_bits(C().decode(SPLIT, WEIGHT, high, low)))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("values", [mixed_values(), finite_values(), torch.randn(1000), torch.randn(0)], ids=len)
@pytest.mark.parametrize("kind", [SIGNED, SQUARE])
def test_8_bit_codes_are_those_of_the_kernels(kind: int, values: Tensor, seed: int | None) -> None:
    values = values.abs() if kind == SQUARE else values
    encode, decode = {
        SIGNED: (formats.encode_signed, formats.decode_signed),
        SQUARE: (formats.encode_root, formats.decode_root),
    }[kind]
    codes, scales = encode(values, seed)
    expected_codes, expected_scales = C().encode(Q8, kind, values, seed)
    assert torch.equal(codes, expected_codes)
    assert torch.equal(int_bits(scales), int_bits(expected_scales))
    found, expected = decode(codes, scales), C().decode(Q8, kind, codes, scales)
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(int_bits(found[there]), int_bits(expected[there]))


@pytest.mark.parametrize("kind", [SIGNED, SQUARE])
@pytest.mark.parametrize("scale", [0.0, 1e-37, 3e-5, 1.0, 7.3, 3e38])
def test_every_8_bit_code_decodes_as_in_the_kernels(kind: int, scale: float) -> None:
    codes, scales = torch.arange(256).to(torch.uint8), torch.tensor([scale])
    decode = formats.decode_root if kind == SQUARE else formats.decode_signed
    assert torch.equal(int_bits(decode(codes, scales)), int_bits(C().decode(Q8, kind, codes, scales)))


# Properties -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (255,), (256,), (257,), (3, 100), (2, 3, 4, 50)], ids=str)
def test_any_shape_comes_back(shape: tuple[int, ...]) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(formats.join(*formats.split(values)), values)
    assert formats.to_bf16_stochastic(values, 1).shape == values.shape
    for encode, decode, source in (
        (formats.encode_signed, formats.decode_signed, values),
        (formats.encode_root, formats.decode_root, values.abs()),
    ):
        codes, scales = encode(source)
        assert codes.shape == values.shape
        assert scales.shape == (-(-values.numel() // BLOCK),)
        error = (decode(codes, scales) - source).abs()
        assert bool(
            (error <= source.abs() / 14 + source.abs().amax() * 2**-14 if values.numel() else error == 0).all()
        )


def test_layout_does_not_matter_to_formats_of_single_elements() -> None:
    values = torch.randn(6, 10, generator=torch.Generator().manual_seed(0)).t()
    assert torch.equal(formats.to_bf16_stochastic(values, 3), formats.to_bf16_stochastic(values.contiguous(), 3))
    assert torch.equal(formats.join(*formats.split(values)), values)


def test_the_upper_half_of_a_split_master_is_the_nearest_bf16() -> None:
    values = finite_values()
    values = values[values.bfloat16().isfinite()]
    high, _ = formats.split(values)
    error = (high.double() - values.double()).abs()
    assert torch.equal(error, (values.bfloat16().double() - values.double()).abs())


def test_stochastic_rounding_is_the_same_on_any_cut_of_a_tensor() -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = formats.to_bf16_stochastic(values, 9)
    assert torch.equal(whole, torch.cat([formats.to_bf16_stochastic(part, 9) for part in values.split(37)]))
    codes, _ = formats.encode_signed(values, 9)
    parts = [formats.encode_signed(part, 9)[0] for part in values.split(2 * BLOCK)]  # scales belong to blocks
    assert torch.equal(codes, torch.cat(parts))


def test_stochastic_bf16_is_right_on_average_and_never_skips_a_neighbour() -> None:
    values = torch.rand(4000, generator=torch.Generator().manual_seed(0)) + 1.0
    found = torch.stack([formats.to_bf16_stochastic(values, formats.seed_of(s, 0)).float() for s in range(400)])
    error = (found - values) / 2**-7  # a step of bf16 between 1 and 2
    assert error.abs().max() < 1
    assert error.mean(dim=0).abs().max() < 5 * 0.5 / 400**0.5
    assert abs(float(error.mean())) < 5 * 0.5 / (400 * 4000) ** 0.5


def test_stochastic_bf16_keeps_representable_and_non_finite_values() -> None:
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    halves = halves[~halves.isnan()]
    assert torch.equal(int_bits(formats.to_bf16_stochastic(halves.float(), 5)), int_bits(halves))
    assert bool(formats.to_bf16_stochastic(torch.tensor([torch.nan]), 5).isnan().all())


@pytest.mark.parametrize("seed", [None, 3])
def test_the_largest_of_a_block_survives_8_bits_exactly(seed: int | None) -> None:
    values = torch.randn(20, BLOCK, generator=torch.Generator().manual_seed(0)) * torch.logspace(-30, 30, 20)[:, None]
    decoded = formats.decode_signed(*formats.encode_signed(values, seed))
    where = values.abs().argmax(dim=1, keepdim=True)
    assert torch.equal(decoded.gather(1, where), values.gather(1, where))
    roots = values.abs()
    assert torch.equal(formats.decode_root(*formats.encode_root(roots, seed)).amax(dim=1), roots.amax(dim=1))


@pytest.mark.parametrize("seed", [None, 3])
def test_8_bits_to_float_to_8_bits_is_the_identity(seed: int | None) -> None:
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    for encode, decode, source in (
        (formats.encode_signed, formats.decode_signed, values),
        (formats.encode_root, formats.decode_root, values.abs()),
    ):
        codes, scales = encode(source, seed)
        again, scales_again = encode(decode(codes, scales))
        assert torch.equal(again, codes)
        assert torch.equal(scales_again, scales)


def test_a_positive_root_never_becomes_zero_and_zero_stays_zero() -> None:
    roots = torch.tensor([1.0, 1e-12, 0.0] * 200)
    for seed in (None, 1, 2):
        decoded = formats.decode_root(*formats.encode_root(roots, seed))
        assert torch.equal(decoded > 0, roots > 0)
    assert not formats.decode_signed(*formats.encode_signed(torch.zeros(300))).any()


def test_a_non_finite_value_affects_only_its_8_bit_block() -> None:
    values = torch.ones(3 * BLOCK)
    for bad in (torch.nan, torch.inf, -torch.inf):
        values[BLOCK + 5] = bad
        decoded = formats.decode_signed(*formats.encode_signed(values))
        assert not bool(decoded[BLOCK : 2 * BLOCK].isfinite().all())
        assert torch.equal(decoded[:BLOCK], values[:BLOCK])
        assert torch.equal(decoded[2 * BLOCK :], values[2 * BLOCK :])
