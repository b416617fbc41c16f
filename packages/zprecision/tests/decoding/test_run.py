"""Steps of one block: products and cache bit for bit, and what is rejected.  zengine tests whole decoders."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

import zprecision as zp
from zprecision.backends import native
from zprecision.decoding import (
    Activation,
    FusedAttention,
    FusedBlock,
    FusedCache,
    FusedDecoder,
    FusedHead,
    FusedMLP,
    FusedNorm,
    FusedProjection,
    unsupported,
)

LIBRARY = native.library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the kernels are not built")
WIDTH, HEADS, SIZE, CAPACITY, SLOTS = 40, 5, 8, 6, 3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cache(dtype: torch.dtype) -> FusedCache:
    shape = (SLOTS, HEADS, CAPACITY, SIZE)
    scales = [torch.zeros(shape[:-1]) if dtype == torch.int8 else None for _ in "kv"]
    return FusedCache(
        keys=torch.zeros(shape, dtype=dtype),
        values=torch.zeros(shape, dtype=dtype),
        key_scales=scales[0],
        value_scales=scales[1],
    )


def block(form: Any = None, dtype: torch.dtype = torch.float32) -> FusedBlock:
    """A block without norms and positions, so that its products are those of its input."""

    def projection(rows: int, columns: int, seed: int, bias: bool = True) -> FusedProjection:
        weight = draw(rows, columns, seed=seed) / columns**0.5
        kept = zp.pack(zp.quantize(weight, form)) if form else weight
        return FusedProjection(kept, draw(rows, seed=seed + 50) if bias else None)

    attention = FusedAttention(
        projections=tuple(projection(WIDTH, WIDTH, seed) for seed in (1, 2, 3)),
        out=projection(WIDTH, WIDTH, 4),
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_size=SIZE,
        scale=0.3,
    )
    mlp = FusedMLP(up=projection(72, WIDTH, 5), down=projection(WIDTH, 72, 6, bias=False), act=Activation.RELU)
    return FusedBlock(norm=None, attention=attention, mlp_norm=None, mlp=mlp, cache=cache(dtype))


def head() -> FusedHead:
    return FusedHead(norm=None, projection=FusedProjection(draw(21, WIDTH, seed=9)), factor=0.5)


def decoder(*blocks: FusedBlock) -> FusedDecoder:
    return FusedDecoder(blocks, head(), width=WIDTH, capacity=CAPACITY)


@pytest.mark.parametrize("form", [None, "int8", "int4", "int4-g64-minmax"])
def test_a_first_token_is_its_products_bit_for_bit(form: str | None) -> None:
    """Of one position attention returns its value."""
    subject, x = block(form and zp.format_named(form)), draw(2, WIDTH, seed=7)
    wanted = x.clone()
    value, out = subject.attention.projections[2], subject.attention.out
    values = zp.linear(wanted, value.weight, value.bias)
    wanted += zp.linear(values, out.weight, out.bias)
    grown = zp.linear(wanted, subject.mlp.up.weight, subject.mlp.up.bias).relu()
    wanted += zp.linear(grown, subject.mlp.down.weight)
    with torch.no_grad():
        logits = decoder(subject).run(x, [2, 0], [0, 0], range(1), with_head=True)
    assert torch.equal(subject.cache.values[[2, 0], :, 0].flatten(1), values)
    assert torch.equal(x, wanted)
    assert logits is not None
    assert torch.equal(logits, zp.linear(wanted, head().projection.weight) * 0.5)


def test_only_the_position_of_the_token_is_written() -> None:
    subject = block()
    subject.cache.keys.fill_(7.0)
    decoder(subject).run(draw(1, WIDTH), [1], [3], range(1))
    changed = (subject.cache.keys != 7.0).nonzero()
    assert changed[:, 0].unique().tolist() == [1]
    assert changed[:, 2].unique().tolist() == [3]


def test_an_int8_cache_has_a_scale_for_each_head() -> None:
    subject, plain = block(dtype=torch.int8), block()
    for each in (subject, plain):
        decoder(each).run(draw(1, WIDTH), [1], [2], range(1))
    wanted = plain.cache.keys[1, :, 2]
    scales = subject.cache.key_scales
    assert scales is not None
    assert torch.equal(scales[1, :, 2], wanted.abs().amax(-1) / 127)
    assert torch.equal(
        subject.cache.keys[1, :, 2], torch.round(wanted * (127 / wanted.abs().amax(-1, True))).to(torch.int8)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_caches_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    subject, plain = block(dtype=dtype), block()
    for each in (subject, plain):
        decoder(each).run(draw(1, WIDTH) * 1e-3, [1], [2], range(1))
    assert torch.equal(subject.cache.values[1, :, 2], plain.cache.values[1, :, 2].to(dtype))


def test_calls_that_do_not_fit_are_rejected() -> None:
    subject = decoder(block())
    with pytest.raises(ValueError, match=r"contiguous float32 of \(1, 40\)"):
        subject.run(draw(1, WIDTH + 1), [0], [0], range(1))
    with pytest.raises(ValueError, match="each in its own slot"):
        subject.run(draw(2, WIDTH), [1, 1], [0, 0], range(1))
    with pytest.raises(ValueError, match="takes 1 to 16 sequences"):
        subject.run(draw(17, WIDTH), list(range(17)), [0] * 17, range(1))


def test_what_has_no_kernel_is_said() -> None:
    subject = block()
    assert unsupported(subject) == ""
    nf4 = FusedProjection(zp.quantize(draw(WIDTH, WIDTH), zp.NF4()))
    other = attrs.evolve(subject, attention=attrs.evolve(subject.attention, out=nf4))
    assert unsupported(other) == "output projection: its format is not one of integers"
    with pytest.raises(ValueError, match="no kernels for this decoder: output projection"):
        decoder(other)
    wide = FusedNorm(size=WIDTH, eps=1e-5, is_centered=False, weight=torch.ones(WIDTH, dtype=torch.float64))
    assert "it must be float32, bfloat16 or float16" in unsupported(attrs.evolve(subject, norm=wide))
    with native.use_level("none"):
        assert unsupported(subject).startswith("no kernels: ")
