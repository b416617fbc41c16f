"""The C kernels on one stream: zk_encode and zk_decode against torch, on every level."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from zoptim.backends import native

F32, BF16, F16, SPLIT, Q8 = range(1, 6)
WEIGHT, SIGNED, SQUARE, GRAD = range(4)  # kinds of stream
CODES = {F32: torch.float32, BF16: torch.bfloat16, F16: torch.float16, SPLIT: torch.bfloat16, Q8: torch.uint8}
BLOCK = 256
LEVELS = {"x86_64": ("sse2", "avx2", "avx512"), "aarch64": ("neon",), "arm64": ("neon",)}


@pytest.fixture(params=LEVELS.get(platform.machine(), ("portable",)))
def library(request: pytest.FixtureRequest) -> Iterator[native.Library]:
    """The extension at each level that runs here."""
    found = native.library()
    if found is None or request.param not in found.levels:
        pytest.skip(f"no {request.param} kernels here")
    with native.use_level(request.param):
        yield found


class Codec:
    """zk_encode and zk_decode of one format and kind of stream, with tensors."""

    def __init__(self, library: native.Library, form: int, kind: int) -> None:
        self.ffi, self.lib, self.form, self.kind = library.ffi, library.lib, form, kind

    def address(self, tensor: Tensor) -> object:
        return self.ffi.cast("void *", tensor.data_ptr())

    def encode(self, values: Tensor, seed: int | None = None) -> tuple[Tensor, Tensor]:
        """Codes with their remainders or scales; rounded to nearest without a seed."""
        codes = torch.zeros(len(values), dtype=CODES[self.form])
        size, dtype = (len(values), torch.int16) if self.form == SPLIT else (-(-len(values) // BLOCK), torch.float32)
        extra = torch.zeros(size, dtype=dtype)
        source = self.ffi.cast("float *", values.data_ptr())
        tail = (len(values), seed or 0, seed is not None)
        self.lib.zk_encode(self.form, self.kind, source, self.address(codes), self.address(extra), *tail)
        return codes, extra

    def decode(self, codes: Tensor, extra: Tensor | None = None) -> Tensor:
        values = torch.zeros(len(codes))
        target = self.ffi.cast("float *", values.data_ptr())
        second = self.ffi.NULL if extra is None else self.address(extra)
        self.lib.zk_decode(self.form, self.kind, self.address(codes), second, target, len(codes))
        return values

    def round_trip(self, values: Tensor, seed: int | None = None) -> Tensor:
        return self.decode(*self.encode(values, seed))


def random_bits(numel: int = 200_001) -> Tensor:
    """float32 of every kind: normal, subnormal, infinite, quiet NaN."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    return torch.where(values.isnan(), torch.nan, values)


def halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, and NaN where NaN is expected."""
    assert torch.equal(actual.isnan(), expected.isnan())
    numbers = ~expected.isnan()
    as_bits = torch.int32 if actual.dtype is torch.float32 else torch.int16
    assert torch.equal(actual[numbers].view(as_bits), expected[numbers].view(as_bits))


@pytest.mark.parametrize(("form", "dtype"), [(F16, torch.float16), (BF16, torch.bfloat16)], ids=["f16", "bf16"])
def test_every_half_becomes_the_float_that_torch_makes_of_it(
    library: native.Library, form: int, dtype: torch.dtype
) -> None:
    assert_same(Codec(library, form, GRAD).decode(halves(dtype)), halves(dtype).float())


@pytest.mark.parametrize(("form", "dtype"), [(F16, torch.float16), (BF16, torch.bfloat16)], ids=["f16", "bf16"])
def test_floats_round_to_the_nearest_half_as_in_torch(library: native.Library, form: int, dtype: torch.dtype) -> None:
    """Random bits; every half, the tie above it and the neighbors of the tie."""
    finite = halves(dtype).float()
    finite = finite[finite.isfinite()].sort().values
    ties = ((finite[1:].double() + finite[:-1].double()) / 2).float()
    near = torch.cat([torch.nextafter(ties, ties + side) for side in (-1.0, 1.0)])
    edges = torch.tensor([65519.0, 65520.0, 65536.0, 3.4e38, torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    for values in (random_bits(), finite, ties, near, edges):
        codes, _ = Codec(library, form, GRAD).encode(values)
        assert_same(codes, values.to(dtype))


def test_a_split_weight_and_its_remainder_hold_every_bit(library: native.Library) -> None:
    values = random_bits()
    codec = Codec(library, SPLIT, WEIGHT)
    weights, remainders = codec.encode(values)
    assert torch.equal(codec.decode(weights, remainders).view(torch.int32), values.view(torch.int32))
    numbers = values.isfinite() & values.bfloat16().isfinite()
    error = (weights[numbers].double() - values[numbers].double()).abs()
    nearest = (values[numbers].bfloat16().double() - values[numbers].double()).abs()
    assert torch.equal(error, nearest)  # the bf16 is the weight itself: rounded to nearest


@pytest.mark.parametrize("scale", [1e-30, 3.3e-5, 1.0, 0.7, 12345.678, 1e30])
def test_an_8_bit_code_becomes_a_float_and_the_same_code_again(library: native.Library, scale: float) -> None:
    for kind, top in ((SIGNED, 120), (SQUARE, 240)):
        magnitudes = torch.arange(top + 1)
        codes = magnitudes if kind == SQUARE else torch.cat([magnitudes, magnitudes + 128])
        codec, scales = Codec(library, Q8, kind), torch.tensor([scale])
        values = codec.decode(codes.to(torch.uint8), scales)
        assert values.abs().max() == scales[0]
        again, scales_again = codec.encode(values)
        assert torch.equal(again.long(), codes)
        assert torch.equal(scales_again, scales)


def test_8_bit_codes_are_within_a_sixteenth_of_the_value(library: native.Library) -> None:
    """Half a step of 3 mantissa bits, 4 for roots; near the bottom of the range the step stops shrinking."""
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(-torch.rand(10 * BLOCK + 7, generator=generator) * 10)
    for kind, bound in ((SIGNED, 1 / 16), (SQUARE, 1 / 32)):
        error = (Codec(library, Q8, kind).round_trip(values) - values).abs() / values
        assert error.max() <= bound * 1.05


def test_a_positive_root_never_becomes_zero_and_zeros_stay_zero(library: native.Library) -> None:
    values = torch.full((BLOCK,), 1e-9)
    values[0] = 1.0
    assert bool((Codec(library, Q8, SQUARE).round_trip(values) > 0).all())
    for kind in (SIGNED, SQUARE):
        assert torch.equal(Codec(library, Q8, kind).round_trip(torch.zeros(BLOCK + 3)), torch.zeros(BLOCK + 3))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_an_8_bit_block_with_an_element_that_is_not_finite_is_seen(library: native.Library, bad: float) -> None:
    values = torch.ones(3 * BLOCK)
    values[BLOCK + 5] = bad
    found = Codec(library, Q8, SIGNED).round_trip(values)
    assert not bool(found[BLOCK : 2 * BLOCK].isfinite().all())
    assert torch.equal(found[:BLOCK], torch.ones(BLOCK))
    assert torch.equal(found[2 * BLOCK :], torch.ones(BLOCK))


@pytest.mark.parametrize(
    ("form", "kind", "mantissa"),
    [(BF16, WEIGHT, 7), (Q8, SIGNED, 3), (Q8, SQUARE, 4)],
    ids=["bf16", "8-bit", "8-bit roots"],
)
def test_stochastic_rounding_goes_to_a_neighbour_and_is_right_on_average(
    library: native.Library, form: int, kind: int, mantissa: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(BLOCK, generator=generator) * 0.9 + 0.01
    values[0] = 1.0
    step = torch.exp2(values.log2().floor() - mantissa)  # between codes
    seeds = torch.randint(2**32, (1000,), generator=generator).tolist()
    codec = Codec(library, form, kind)
    error = torch.stack([codec.round_trip(values, seed) - values for seed in seeds]) / step
    assert error.abs().max() < 1.001
    assert bool((error[:, 0] == 0).all())  # the largest of a block is exact
    mean = error.mean(dim=0)  # of each value: standard deviation at most 0.5 / sqrt(1000)
    assert mean.abs().max() < 5 * 0.016
    assert abs(float(mean.mean())) < 5 * 0.001


def test_stochastic_rounding_is_a_function_of_value_and_seed_alone(library: native.Library) -> None:
    values, codec = random_bits(1025), Codec(library, BF16, WEIGHT)
    whole, _ = codec.encode(values, seed=7)
    parts = torch.cat([codec.encode(part, seed=7)[0] for part in values.split(100)])
    assert torch.equal(whole.view(torch.int16), parts.view(torch.int16))
    assert not torch.equal(whole.view(torch.int16), codec.encode(values, seed=8)[0].view(torch.int16))


def test_stochastic_rounding_keeps_exact_and_non_finite_values(library: native.Library) -> None:
    values = halves(torch.bfloat16).float()
    values = torch.where(values.isnan(), torch.nan, values)
    for seed in (1, 2, 3):
        codes, _ = Codec(library, BF16, WEIGHT).encode(values, seed)
        assert_same(codes, values.bfloat16())
