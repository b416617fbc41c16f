"""Steps of one block: products and cache bit for bit, and what is rejected.  zengine tests whole decoders."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
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
    FusedJoin,
    FusedMixture,
    FusedMLP,
    FusedNorm,
    FusedProjection,
    FusedRotary,
    FusedSum,
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


@pytest.mark.parametrize("form", [None, "int8", "int8-a16", "int4", "int4-g64-minmax"])
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


def experts(number: int, form: Any = None) -> tuple[FusedMLP, ...]:
    def projection(rows: int, columns: int, seed: int) -> FusedProjection:
        weight = draw(rows, columns, seed=seed) / columns**0.5
        return FusedProjection(zp.pack(zp.quantize(weight, form)) if form else weight)

    return tuple(
        FusedMLP(up=projection(72, WIDTH, 60 + k), down=projection(WIDTH, 72, 80 + k), act=Activation.RELU)
        for k in range(number)
    )


@pytest.mark.parametrize("form", [None, "int8", "int8-a16", "int4"])
@pytest.mark.parametrize("is_renormalized", [False, True])
def test_a_mixture_adds_the_chosen_experts_in_their_order(form: str | None, is_renormalized: bool) -> None:
    mlps = experts(5, form and zp.format_named(form))
    router = FusedProjection(draw(5, WIDTH, seed=11) / 3, draw(5, seed=12))
    mixture = FusedMixture(router=router, experts=mlps, top_k=2, is_renormalized=is_renormalized, factor=0.5)
    plain, x = block(), draw(3, WIDTH, seed=7)
    empty = attrs.evolve(plain.mlp, down=FusedProjection(torch.zeros(WIDTH, 72)))
    given = x.clone()
    decoder(attrs.evolve(plain, mlp=empty)).run(given, [0, 1, 2], [0, 0, 0], range(1))  # what the MLP reads
    decoder(attrs.evolve(plain, mlp=mixture)).run(x, [0, 1, 2], [0, 0, 0], range(1))
    weights, chosen = torch.softmax(zp.linear(given, router.weight, router.bias), -1).topk(2, -1)
    if is_renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    for row in range(3):
        total = torch.zeros(1, WIDTH)
        for expert, weight in sorted(zip(chosen[row].tolist(), weights[row].tolist(), strict=True)):
            grown = zp.linear(given[row : row + 1], mlps[expert].up.weight).relu()
            total += 0.5 * weight * zp.linear(grown, mlps[expert].down.weight)
        torch.testing.assert_close(x[row : row + 1], given[row : row + 1] + total, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("form", [None, "int4"])
@pytest.mark.parametrize("bounds", [(0, 1, 5), (0, 3, 5)])
def test_terms_of_parts_of_a_mixture_add_up_to_the_whole(form: str | None, bounds: tuple[int, ...]) -> None:
    mlps = experts(5, form and zp.format_named(form))
    router = FusedProjection(draw(5, WIDTH, seed=11) / 3, draw(5, seed=12))
    shared = attrs.evolve(experts(6)[5], down=FusedProjection(draw(WIDTH, 72, seed=99)))
    whole = FusedMixture(router=router, experts=mlps, top_k=2, is_renormalized=True, shared=shared)
    wanted = draw(SLOTS, WIDTH, seed=7)
    decoder(attrs.evolve(block(), mlp=whole)).run(wanted, range(SLOTS), [0] * SLOTS, range(1))
    terms: list[torch.Tensor] = []
    for first, end in itertools.pairwise(bounds):
        part = attrs.evolve(whole, experts=mlps[first:end], first=first, shared=shared if first else None)

        def add_up(x: torch.Tensor) -> None:
            terms.append(x.clone())
            if len(terms) == 2:
                x += terms[0]

        found = draw(SLOTS, WIDTH, seed=7)
        split = attrs.evolve(block(), mlp=part, down_ranks=FusedSum(add_up))
        decoder(split).run(found, range(SLOTS), [0] * SLOTS, range(1))
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)
    if bounds[1] == 1:
        assert (terms[0] == 0).all(-1).any(), "a token that chose no expert of the part"


@pytest.mark.parametrize("level", () if LIBRARY is None else LIBRARY.levels)
def test_activations_of_both_widths_meet_in_a_block_whatever_the_other_tokens(level: str) -> None:
    """Gate and up of 16 bits, the rest of 8."""
    subject, wide = block(zp.format_named("int8")), block(zp.format_named("int8-a16"))
    subject = attrs.evolve(subject, mlp=attrs.evolve(subject.mlp, up=wide.mlp.up))
    together, alone = draw(SLOTS, WIDTH, seed=7), draw(SLOTS, WIDTH, seed=7)
    with native.use_level(level):
        decoder(subject).run(together, range(SLOTS), [0] * SLOTS, range(1))
        for row in range(SLOTS):
            decoder(subject).run(alone[row : row + 1], [SLOTS - 1 - row], [0], range(1))
    assert torch.equal(together, alone)
    other = draw(SLOTS, WIDTH, seed=7)
    decoder(attrs.evolve(subject, mlp=attrs.evolve(subject.mlp, up=block(zp.format_named("int8")).mlp.up))).run(
        other, range(SLOTS), [0] * SLOTS, range(1)
    )
    assert not torch.equal(together, other)


def test_routers_of_nan_and_of_equal_outputs_choose_experts_that_exist() -> None:
    for fill, is_finite in ((torch.nan, False), (0.0, True)):
        router = FusedProjection(torch.full((4, WIDTH), fill))
        subject = attrs.evolve(block(), mlp=FusedMixture(router=router, experts=experts(4), top_k=3))
        x = draw(2, WIDTH)
        decoder(subject).run(x, [0, 1], [0, 0], range(1))
        assert bool(x.isfinite().all()) is is_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_plain_weights_of_all_dtypes_and_orders_are_read_where_they_lie(
    dtype: torch.dtype, is_transposed: bool
) -> None:
    weight = (draw(21, WIDTH, seed=9) / WIDTH**0.5).to(dtype)
    given = weight.t().contiguous().t() if is_transposed else weight
    subject = FusedDecoder(
        [], FusedHead(norm=None, projection=FusedProjection(given)), width=WIDTH, capacity=CAPACITY
    )
    for tokens in (1, 2, 7, 16):
        x = draw(tokens, WIDTH)
        found = {}
        for level in LIBRARY.levels if LIBRARY is not None else ():
            with native.use_level(level):
                found[level] = subject.run(x, list(range(tokens)), [0] * tokens, range(0), with_head=True)
        wanted = x.double() @ weight.double().t()
        first = next(iter(found.values()))
        assert first is not None
        assert all(each is not None and torch.equal(each, first) for each in found.values())
        torch.testing.assert_close(first.double(), wanted, rtol=1e-5, atol=1e-6)
        alone = subject.run(x[-1:].contiguous(), [0], [0], range(0), with_head=True)
        assert alone is not None
        assert torch.equal(alone[0], first[-1])


class Exchange:
    """Two ranks, as threads."""

    def __init__(self) -> None:
        self.barrier, self.mail = threading.Barrier(2, timeout=300), [torch.empty(0), torch.empty(0)]

    def swap(self, rank: int, x: Tensor) -> list[Tensor]:
        self.mail[rank] = x.clone()
        self.barrier.wait()
        both = list(self.mail)
        self.barrier.wait()
        return both

    def total(self, rank: int) -> FusedSum:
        return FusedSum(lambda x: x.copy_(sum(self.swap(rank, x))))

    def join(self, rank: int) -> FusedJoin:
        both = lambda x: torch.cat(self.swap(rank, x), -1)  # noqa: E731
        return FusedJoin(both, both)


def cut(projection: FusedProjection, dim: int, first: int, end: int, *, with_bias: bool = True) -> FusedProjection:
    weight = projection.weight
    part = weight[first:end] if dim == 0 else weight[:, first:end].contiguous()
    bias = projection.bias
    if dim == 0 and bias is not None:
        bias = bias[first:end]
    return FusedProjection(part, bias if with_bias else None)


def packed(subject: FusedBlock, form: Any) -> FusedBlock:
    """The block with quantized projections."""

    def narrow(each: FusedProjection) -> FusedProjection:
        return attrs.evolve(each, weight=zp.pack(zp.quantize(each.weight, form)))

    attention = attrs.evolve(
        subject.attention,
        projections=tuple(map(narrow, subject.attention.projections)),
        out=narrow(subject.attention.out),
    )
    mlp = attrs.evolve(subject.mlp, up=narrow(subject.mlp.up), down=narrow(subject.mlp.down))
    return attrs.evolve(subject, attention=attention, mlp=mlp)


def half(whole: FusedBlock, rank: int, exchange: Exchange, joins: bool) -> FusedBlock:
    """Heads 0 to 3 of five, or the others; 48 or 24 features of the MLP."""
    heads, grown = ((0, 3), (0, 48)) if rank == 0 else ((3, 5), (48, 72))
    rows, own = (heads[0] * SIZE, heads[1] * SIZE), (0, 16) if rank == 0 else (16, WIDTH)
    attention, mlp, kept = whole.attention, whole.mlp, cache(torch.float32)
    out = cut(attention.out, 0, *own) if joins else cut(attention.out, 1, *rows, with_bias=rank == 0)
    down = cut(mlp.down, 0, *own) if joins else cut(mlp.down, 1, *grown, with_bias=rank == 0)
    num = heads[1] - heads[0]
    ranks = exchange.join(rank) if joins else exchange.total(rank)
    return attrs.evolve(
        whole,
        attention=attrs.evolve(
            attention,
            projections=tuple(cut(each, 0, *rows) for each in attention.projections),
            out=out,
            num_heads=num,
            num_kv_heads=num,
        ),
        mlp=attrs.evolve(mlp, up=cut(mlp.up, 0, *grown), down=down),
        out_ranks=ranks,
        down_ranks=ranks,
        cache=FusedCache(keys=kept.keys[:, :num].contiguous(), values=kept.values[:, :num].contiguous()),
    )


@pytest.mark.parametrize("form", [None, "int8", "int8-a16", "int4"])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("has_norms", [False, True])
def test_two_ranks_compute_what_one_computes(form: str | None, joins: bool, has_norms: bool) -> None:
    if form and not joins:
        return  # cuts of columns at 24 are within groups of 32
    plain = block()
    if has_norms:
        norms = {name: norm(WIDTH, WIDTH) for name in ("norm", "out_norm", "mlp_norm", "mlp_out_norm")}
        plain = attrs.evolve(plain, **norms)
    given, exchange = zp.format_named(form) if form else None, Exchange()

    def run(*blocks: FusedBlock) -> tuple[Tensor, Tensor]:
        subject = FusedDecoder(blocks, head(), width=WIDTH, capacity=CAPACITY)
        x = draw(2, WIDTH, seed=7)
        for position in range(3):
            logits = subject.run(x, [2, 0], [position] * 2, range(len(blocks)), with_head=True)
        assert logits is not None
        return x, logits

    def kind(each: FusedBlock) -> FusedBlock:
        return packed(each, given) if given else each

    other = attrs.evolve(plain, cache=cache(torch.float32))
    wanted = run(kind(plain), kind(other))
    parts = [[kind(half(each, rank, exchange, joins)) for each in (plain, other)] for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda blocks: run(*blocks), parts))
    for pair in found:
        for each, expected in zip(pair, wanted, strict=True):
            if joins:
                assert torch.equal(each, expected)
            else:
                assert float((each - expected).abs().max() / expected.abs().max()) < 1e-5


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


@pytest.mark.parametrize(
    ("slots", "positions", "blocks", "message"),
    [
        ([-1], [0], range(1), r"slots \[-1\]; the cache has 3"),
        ([SLOTS], [0], range(1), r"slots \[3\]; the cache has 3"),
        ([0], [-1], range(1), r"positions \[-1\]; a slot has 6"),
        ([0], [CAPACITY], range(1), r"positions \[6\]; a slot has 6"),
        ([0], [0], range(2), r"blocks range\(0, 2\); there are 1"),
        ([0], [0], range(-1, 1), "there are 1"),
    ],
)
def test_places_that_do_not_exist_are_rejected_before_anything_is_written(
    slots: list[int], positions: list[int], blocks: range, message: str
) -> None:
    block_, x = block(), draw(1, WIDTH)
    with pytest.raises(ValueError, match=message):
        decoder(block_).run(x, slots, positions, blocks, with_head=True)
    assert torch.equal(x, draw(1, WIDTH))
    assert not block_.cache.keys.any()


def test_logits_need_a_head() -> None:
    with pytest.raises(ValueError, match="this decoder has no head"):
        FusedDecoder([block()], None, width=WIDTH, capacity=CAPACITY).run(
            draw(1, WIDTH), [0], [0], range(1), with_head=True
        )


def rotary(positions: int, half: int) -> FusedRotary:
    return FusedRotary(cos=draw(positions, half), sin=draw(positions, half), is_neighbours=False)


def norm(size: int, length: int) -> FusedNorm:
    return FusedNorm(size=size, eps=1e-5, is_centered=False, weight=draw(length))


ATTENTION: dict[str, dict[str, Any]] = {
    "these must divide the heads": {"num_kv_heads": 3},
    "its weight is \\(40, 40\\) and must be \\(48, 40\\)": {"num_heads": 6, "num_kv_heads": 6},
    "its weight is \\(40, 39\\) and must be \\(40, 40\\)": {"out": FusedProjection(draw(WIDTH, 39))},
    "its bias is \\(39,\\) and must be \\(40,\\)": {"out": FusedProjection(draw(WIDTH, WIDTH), draw(39))},
    "2 projections of queries": {"projections": (FusedProjection(draw(WIDTH, WIDTH)),) * 2},
    "rotate 10 features of heads that have 8": {"rotary": rotary(CAPACITY, 5)},
    "cosines are \\(5, 4\\) and must be \\(6, 4\\)": {"rotary": rotary(CAPACITY - 1, 4)},
    "query norm: its size is 16 and must be 8 or 40": {"query_norm": norm(16, 16)},
    "key norm: its vector is \\(7,\\) and must be \\(8,\\)": {"key_norm": norm(8, 7)},
}


@pytest.mark.parametrize("message", ATTENTION)
def test_attention_of_tensors_that_do_not_fit_is_rejected(message: str) -> None:
    subject = block()
    other = attrs.evolve(subject, attention=attrs.evolve(subject.attention, **ATTENTION[message]))
    with pytest.raises(ValueError, match=message):
        decoder(other)


def test_blocks_of_tensors_that_do_not_fit_are_rejected() -> None:
    subject = block()
    short = attrs.evolve(cache(torch.float32), values=torch.zeros(SLOTS, HEADS, CAPACITY - 1, SIZE))
    apart = attrs.evolve(cache(torch.float32), keys=torch.zeros(SLOTS, CAPACITY, HEADS, SIZE).transpose(1, 2))
    unscaled = attrs.evolve(cache(torch.int8), key_scales=None)
    narrow = attrs.evolve(cache(torch.int8), value_scales=torch.zeros(SLOTS, HEADS, CAPACITY, dtype=torch.bfloat16))
    grown = attrs.evolve(subject.mlp, up=FusedProjection(draw(71, WIDTH)))
    for changed, message in (
        ({"cache": short}, "values are torch.float32 of"),
        ({"cache": apart}, "keys are torch.float32 on cpu and must be contiguous torch.float32 on the CPU"),
        ({"cache": unscaled}, "scales of keys are None"),
        ({"cache": narrow}, "scales of values are torch.bfloat16"),
        ({"mlp": grown}, r"up projection: its weight is \(71, 40\) and must be \(72, 40\)"),
        ({"mlp": attrs.evolve(subject.mlp, is_fused=True)}, r"up projection: .* must be \(144, 40\)"),
        (
            {"mlp": FusedMixture(router=FusedProjection(draw(3, WIDTH)), experts=experts(4), top_k=2)},
            "4 experts from number 0 on are held, and the router has 3",
        ),
        (
            {"mlp": FusedMixture(router=FusedProjection(draw(4, WIDTH)), experts=experts(4), top_k=5)},
            "5 of 4 experts are chosen",
        ),
        (
            {"mlp": FusedMixture(router=FusedProjection(draw(4, WIDTH)), experts=experts(2), top_k=1, first=1)},
            "2 of 4 experts are held, and no ranks add up what they compute",
        ),
        (
            {
                "mlp": FusedMixture(
                    router=FusedProjection(draw(2, WIDTH)),
                    experts=(experts(1)[0], subject.mlp),
                    top_k=1,
                    shared_gate=FusedProjection(draw(1, WIDTH)),
                )
            },
            "no shared expert",
        ),
        (
            {
                "mlp": FusedMixture(
                    router=FusedProjection(draw(2, WIDTH)),
                    top_k=1,
                    experts=(experts(1)[0], experts(1, zp.format_named("int8"))[0]),
                )
            },
            "expert 1 has another form",
        ),
        ({"mlp_norm": norm(WIDTH - 8, WIDTH - 8)}, "mlp_norm: its size is 32 and must be 40"),
    ):
        with pytest.raises(ValueError, match=message):
            decoder(attrs.evolve(subject, **changed))
    with pytest.raises(ValueError, match=r"head: its weight is \(21, 40\) and must be \(21, 41\)"):
        FusedDecoder([], head(), width=WIDTH + 1, capacity=CAPACITY)


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
    many = FusedMixture(router=FusedProjection(draw(20, WIDTH)), experts=experts(20), top_k=17)
    assert "17 experts are chosen for a token" in unsupported(attrs.evolve(subject, mlp=many))
    with native.use_level("none"):
        assert unsupported(subject).startswith("no kernels: ")
