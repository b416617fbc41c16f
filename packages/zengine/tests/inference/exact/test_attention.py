import attrs
import pytest
import torch
from torch import Tensor

from zengine.inference.attend import attend, causal_mask
from zengine.inference.exact.attention import AttentionRule, attend_sequences, attend_slots, padded_length
from zengine.inference.exact.products import Products


@attrs.frozen
class Row:
    batch: int
    time: int
    heads: int
    groups: int
    size: int
    softcap: float = 0.0
    window: int = 0


ROWS = [
    Row(2, 100, 6, 2, 20), Row(3, 256, 4, 4, 64), Row(1, 300, 4, 1, 8, 5.0, 9), Row(2, 17, 7, 1, 6),
    Row(2, 393, 2, 2, 16, 0.0, 200),
]  # fmt: skip
each_row = pytest.mark.parametrize("row", ROWS, ids=str)
both = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def tensors(row: Row, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(row.batch, row.time, heads, row.size) for heads in (row.heads, row.groups, row.groups)]
    query, key, value = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return query, key, value


def rule_of(row: Row) -> AttentionRule:
    return AttentionRule(scale=0.4, softcap=row.softcap, window=row.window)


@both
@each_row
def test_values_and_gradients_are_those_of_plain_attention(row: Row, dtype: torch.dtype) -> None:
    given = [each.requires_grad_() for each in tensors(row, dtype)]
    wide = [each.detach().double().requires_grad_() for each in given]
    positions = torch.arange(row.time)
    mask = causal_mask(positions, positions, row.window)[None]
    wanted = attend(wide[0], wide[1], wide[2], mask, scale=0.4, softcap=row.softcap)
    found = attend_sequences(Products(), rule_of(row), given[0], given[1], given[2])
    above = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    pairs = zip(
        (found, *torch.autograd.grad(found, given, above)),
        (wanted, *torch.autograd.grad(wanted, wide, above.double())),
        strict=True,
    )
    for one, other in pairs:
        assert one.dtype == dtype
        assert (one.double() - other).norm() / other.norm() < (1e-6 if dtype == torch.float32 else 4e-3)


@both
@each_row
def test_a_query_over_a_cache_has_the_bits_of_the_whole_sequence(row: Row, dtype: torch.dtype) -> None:
    products, rule, (query, key, value) = Products(), rule_of(row), tensors(row, dtype)
    whole = attend_sequences(products, rule, query, key, value)
    rest = torch.randn(2, row.batch, row.groups, 640, row.size).to(dtype)  # of other sequences, behind
    for at in sorted({0, 1, row.time // 2, min(127, row.time - 1), min(128, row.time - 1), row.time - 1}):
        keys, values = rest.clone()
        keys[:, :, : at + 1], values[:, :, : at + 1] = (x[:, : at + 1].transpose(1, 2) for x in (key, value))
        most, lengths = padded_length(at + 1), torch.full((row.batch,), at + 1)
        found = attend_slots(products, rule, query[:, at], (keys[:, :, :most], values[:, :, :most]), lengths)
        assert torch.equal(found, whole[:, at])
        alone = attend_slots(products, rule, query[-1:, at], (keys[-1:], values[-1:]), lengths[-1:])
        assert torch.equal(alone, whole[-1:, at]), "in a longer cache, without the other sequences"


@each_row
def test_a_part_of_a_sequence_continues_it(row: Row) -> None:
    products, rule, (query, key, value) = Products(), rule_of(row), tensors(row, torch.float32)
    whole = attend_sequences(products, rule, query, key, value)
    assert torch.equal(attend_sequences(products, rule, query[:1, 5:], key[:1], value[:1], 5), whole[:1, 5:])
    short = attend_sequences(products, rule, query[:, :11], key[:, :11], value[:, :11])
    assert torch.equal(short, whole[:, :11])


def test_gradients_of_a_sequence_do_not_depend_on_the_batch() -> None:
    products, row = Products(), ROWS[0]
    given = [each.requires_grad_() for each in tensors(row, torch.float32)]
    above = torch.randn(row.batch, row.time, row.heads * row.size)
    found = torch.autograd.grad(attend_sequences(products, rule_of(row), *given), given, above)
    one = [each.detach()[1:].requires_grad_() for each in given]
    alone = torch.autograd.grad(attend_sequences(products, rule_of(row), *one), one, above[1:])
    assert all(torch.equal(each[0], other[1]) for each, other in zip(alone, found, strict=True))


def test_backward_keeps_no_matrix_of_scores() -> None:
    given = [each.requires_grad_() for each in tensors(Row(1, 512, 4, 4, 16), torch.float32)]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        attend_sequences(Products(), rule_of(ROWS[0]), *given)
    assert sum(saved) == 3 * 512 * 4 * 16
