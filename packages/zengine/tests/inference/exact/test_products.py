import pytest
import torch
from torch import Tensor

from zengine.inference.exact import products
from zengine.inference.exact.products import TILE, NotInvariant, Products, pad_rows, widened

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(6, 6), (64, 6), (24, 100), (384, 257), (1536, 16), (3, 40)])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_is_that_of_a_tile_wherever_it_stands(
    shape: tuple[int, int], dtype: torch.dtype, is_transposed: bool, with_bias: bool
) -> None:
    subject, x = Products(), draw(1616, shape[0], dtype=dtype)
    matrix = draw(*shape[::-1], dtype=dtype, seed=1).t() if is_transposed else draw(*shape, dtype=dtype, seed=1)
    bias = draw(shape[1], dtype=dtype, seed=2) if with_bias else None
    whole = subject.of_rows(x, matrix, bias)
    wanted = x.double() @ matrix.double() + (0 if bias is None else bias.double())
    assert (whole.double() - wanted).norm() / wanted.norm() < (1e-6 if dtype == torch.float32 else 5e-3)
    for start, place in ((0, 3), (700, 0), (1609, 9)):
        tile = draw(TILE, shape[0], dtype=dtype, seed=start)
        tile[place] = x[start]
        assert torch.equal(subject.of_rows(tile, matrix, bias)[place], whole[start])


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_bits_do_not_depend_on_threads(num_threads: int) -> None:
    x, matrix = draw(208, 96), draw(96, 384, seed=1)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(num_threads)
        found = (
            Products().of_rows(x, matrix),
            Products().of_batches(x.view(4, 52, 96)[:, :48], matrix.repeat(4, 1, 1)),
        )
        torch.set_num_threads(1)
        alone = (
            Products().of_rows(x, matrix),
            Products().of_batches(x.view(4, 52, 96)[:, :48], matrix.repeat(4, 1, 1)),
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], alone[0])
    assert torch.equal(found[1], alone[1])


def test_a_library_that_treats_large_calls_otherwise_gets_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def is_tiled(_call: object, x: Tensor) -> bool:
        return x.shape[0] == 64

    def mm(x: Tensor, matrix: Tensor, *, out: Tensor) -> Tensor:
        calls.append(len(x))
        return out.copy_(x @ matrix)

    monkeypatch.setattr(products, "_is_tiled", is_tiled)
    monkeypatch.setattr(torch, "mm", mm)
    subject = Products()
    subject.of_rows(draw(176, 32), draw(32, 32))
    assert calls == [64, 64, 16, 16, 16]
    subject.of_rows(draw(32, 32), draw(32, 32))
    assert calls[5:] == [16, 16]
    assert len(subject.compared) == 3, "sizes of 128, 64 and 32 rows were compared once, and no others"


def test_batches_that_differ_from_single_tiles_are_computed_by_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y, base = draw(3, 48, 32), draw(3, 32, 16, seed=1), draw(3, 48, 16, seed=2)
    wanted = Products().of_batches(x, y), Products().of_batches(x, y, added_to=base.clone())
    monkeypatch.setattr(products, "_is_tiled", lambda _call, _x: False)
    found = Products().of_batches(x, y), Products().of_batches(x, y, added_to=base.clone())
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1], wanted[1])


def test_a_place_in_a_tile_that_matters_is_an_error() -> None:
    def call(x: Tensor) -> Tensor:
        return x * torch.arange(1, len(x) + 1)[:, None]

    with pytest.raises(NotInvariant, match="depends on its place among them"):
        products._is_tiled(call, draw(64, 8))


def test_a_row_that_depends_on_the_number_of_rows_is_noticed() -> None:
    assert products._is_tiled(lambda x: x * 2, draw(64, 8))
    assert not products._is_tiled(lambda x: x * len(x), draw(64, 8))


def test_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    Products().of_rows(draw(64, 32), draw(32, 32))
    assert torch.equal(torch.get_rng_state(), before)


def test_padding_appends_zeros() -> None:
    assert pad_rows(draw(5, 3)).shape == (16, 3)
    assert not pad_rows(draw(5, 3))[5:].any()
    assert pad_rows(draw(32, 3)).shape == (32, 3)
    assert widened(draw(5, 3)).shape == (5, 16)
    assert widened(draw(5, 30), 0).shape == (16, 30)
    assert widened(draw(5, 30)).shape == (5, 30)
