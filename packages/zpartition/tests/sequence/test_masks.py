"""Masks of whole sequences equal those written by hand, dense or in blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from zpartition.sequence.masks import MaskKind, Tokens, padding_of

ORDINARY = [[0, 1, 2, 3, 4, 5]]
PACKED = [[0, 1, 2, 0, 1, 0]]


def tokens(positions: list[list[int]], valid: list[list[int]] | None = None) -> Tokens:
    rows = torch.tensor(positions)
    return Tokens.of(rows, torch.ones_like(rows, dtype=torch.bool) if valid is None else torch.tensor(valid).bool())


def by_hand(made: Tokens, mask_kind: MaskKind) -> Tensor:
    length = made.positions.shape[1]
    found = torch.zeros(1, 1, length, length, dtype=torch.bool)
    document = 0
    documents = []
    positions = made.positions[0].tolist()
    for index, position in enumerate(positions):
        document += index > 0 and position != positions[index - 1] + 1
        documents.append(document)
    for row in range(length):
        for column in range(length):
            is_near = not mask_kind.window or abs(row - column) < mask_kind.window
            is_before = column <= row or not mask_kind.is_causal
            sees = documents[row] == documents[column] and bool(made.is_valid[0, column]) and is_near and is_before
            found[0, 0, row, column] = sees or row == column
    return found


@pytest.mark.parametrize(
    "mask_kind", [MaskKind(), MaskKind(window=2), MaskKind(is_causal=False), MaskKind(is_causal=False, window=3)]
)
@pytest.mark.parametrize(
    ("positions", "valid"),
    [(ORDINARY, None), (PACKED, None), (ORDINARY, [[0, 0, 1, 1, 1, 1]]), (ORDINARY, [[1, 1, 1, 1, 0, 0]])],
)
def test_dense_masks(positions: Any, valid: Any, mask_kind: MaskKind) -> None:
    made = tokens(positions, valid)
    expected = by_hand(made, mask_kind)
    assert torch.equal(made.dense(mask_kind), expected)
    assert made.dense(mask_kind) is made.dense(mask_kind)
    assert bool(made.blocks(mask_kind).to_dense().any())
    plain = torch.ones(6, 6, dtype=torch.bool)
    plain = plain.tril() if mask_kind.is_causal else plain
    hidden = made.is_valid[0] if valid else torch.ones(6, dtype=torch.bool)
    if not made.needs_mask(mask_kind):  # rows of padding do not matter
        assert torch.equal(expected[0, 0][hidden], plain[hidden])


def test_block_masks_equal_dense_masks() -> None:
    made = tokens(PACKED, [[1, 1, 0, 1, 1, 1]])
    mask_kind = MaskKind(window=2)
    mod = made.blocks(mask_kind).mask_mod
    found = [
        [bool(mod(torch.tensor(0), torch.tensor(0), torch.tensor(i), torch.tensor(j))) for j in range(6)]
        for i in range(6)
    ]
    assert torch.equal(torch.tensor(found), made.dense(mask_kind)[0, 0])


def test_a_mask_is_built_only_if_is_causal_does_not_suffice() -> None:
    assert not tokens(ORDINARY).needs_mask(MaskKind())
    assert not tokens(ORDINARY, [[1, 1, 1, 1, 0, 0]]).needs_mask(MaskKind())
    assert tokens(ORDINARY, [[0, 0, 1, 1, 1, 1]]).needs_mask(MaskKind())
    assert tokens(ORDINARY, [[1, 1, 1, 1, 0, 0]]).needs_mask(MaskKind(is_causal=False))
    assert tokens(PACKED).needs_mask(MaskKind())
    assert tokens(ORDINARY).needs_mask(MaskKind(window=5))
    assert not tokens(ORDINARY).needs_mask(MaskKind(window=6))


def test_padding_is_read_from_any_mask() -> None:
    like = torch.zeros(1, 3, dtype=torch.int64)
    square = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 1, 0]]).bool().view(1, 1, 3, 3)
    flex = create_block_mask(lambda b, _head, i, j: square[b, 0, i, j], 1, None, 3, 3, device="cpu")
    for mask in (square, torch.tensor([[1, 1, 0]]), torch.zeros(1, 1, 3, 3).masked_fill(~square, -1e9), flex):
        assert padding_of(mask, like).tolist() == [[True, True, False]]
    causal = create_block_mask(lambda _b, _head, i, j: i >= j, None, None, 3, 3, device="cpu")
    assert padding_of(causal, like).tolist() == [[True] * 3]  # looks up nothing
    assert padding_of(None, like).tolist() == padding_of("blocks", like).tolist() == [[True] * 3]
