"""Block layouts against the sentences of DeepSpeed's documentation, block by block."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zengine.sparse_attention import (
    BigBirdSparsityConfig,
    BSLongformerSparsityConfig,
    DenseSparsityConfig,
    FixedSparsityConfig,
    LocalSlidingWindowSparsityConfig,
    SparsityConfig,
    VariableSparsityConfig,
)


def rows(layout: torch.Tensor, head: int = 0) -> list[str]:
    return ["".join(map(str, row)) for row in layout[head].tolist()]


def test_dense_is_full() -> None:
    assert DenseSparsityConfig(num_heads=2, block=4).make_layout(12).equal(torch.ones(2, 3, 3, dtype=torch.int64))


def fixed(n: int, head: int, **o: Any) -> torch.Tensor:
    """Return a fixed layout, block by block."""
    size, many = o["num_local_blocks"], o["num_global_blocks"]
    causal = o["attention"] == "unidirectional"
    offset = size - (1 + head % o["num_different_global_patterns"]) * many
    starts = {begin + offset for begin in range(0, n - size + 1, size)}
    if n % size:
        starts.add(min(n - n % size + offset, n - many))
    found = torch.zeros(n, n, dtype=torch.int64)
    for row in range(n):
        for col in range(n):
            is_local = row // size == col // size and (col <= row or not causal)
            is_global = any(s <= col < s + many and (row >= s or not causal) for s in starts)
            is_flat = o["horizontal_global_attention"] and any(s <= row < s + many for s in starts)
            found[row, col] = is_local or is_global or is_flat
    return found


FIXED = [
    {"num_local_blocks": 4, "num_global_blocks": 1},
    {"num_local_blocks": 4, "num_global_blocks": 2, "attention": "unidirectional"},
    {"num_local_blocks": 3, "num_global_blocks": 1, "horizontal_global_attention": True},
    {
        "num_local_blocks": 4,
        "num_global_blocks": 1,
        "different_layout_per_head": True,
        "num_different_global_patterns": 3,
    },
    {"num_local_blocks": 2, "num_global_blocks": 2, "attention": "unidirectional", "different_layout_per_head": True},
]


@pytest.mark.parametrize("options", FIXED)
@pytest.mark.parametrize("num_blocks", [4, 8, 9, 10, 11])
def test_fixed_has_windows_and_their_representatives(options: dict[str, Any], num_blocks: int) -> None:
    layout = FixedSparsityConfig(num_heads=5, block=2, **options).make_layout(2 * num_blocks)
    full = {
        "attention": "bidirectional",
        "horizontal_global_attention": False,
        "num_different_global_patterns": 1,
        **options,
    }
    for head in range(5):
        assert layout[head].equal(fixed(num_blocks, head if options.get("different_layout_per_head") else 0, **full))


def test_fixed_looks_like_the_picture_of_the_documentation() -> None:
    """Four local blocks, the last one global, for an autoregressive model."""
    layout = FixedSparsityConfig(num_heads=1, block=16, attention="unidirectional").make_layout(128)
    assert rows(layout) == [
        *("10000000", "11000000", "11100000", "11110000"),
        *("00011000", "00011100", "00011110", "00011111"),
    ]


def test_variable_windows_repeat_the_last_size_and_globals_are_columns() -> None:
    config = VariableSparsityConfig(num_heads=2, block=1, local_window_blocks=[1, 3, 2], global_block_indices=[2, 20])
    assert rows(config.make_layout(9), 1) == [
        "101000000",
        *["011100000"] * 3,
        *["001011000"] * 2,
        *["001000110"] * 2,
        "001000001",
    ]
    ranges = VariableSparsityConfig(
        num_heads=1,
        block=1,
        local_window_blocks=[2],
        global_block_indices=[1],
        global_block_end_indices=[3],
        horizontal_global_attention=True,
    )
    assert rows(ranges.make_layout(5)) == ["11100", "11111", "11111", "01110", "01101"]
    causal = VariableSparsityConfig(num_heads=1, block=1, local_window_blocks=[2], attention="unidirectional")
    assert rows(causal.make_layout(4)) == ["1000", "1100", "1010", "1011"]


def test_bigbird_has_a_window_global_blocks_and_random_ones() -> None:
    plain = BigBirdSparsityConfig(num_heads=1, block=1, num_random_blocks=0).make_layout(6)
    assert rows(plain) == ["111111", "111000", "111100", "101110", "100111", "100011"]
    causal = BigBirdSparsityConfig(num_heads=1, block=1, num_random_blocks=0, attention="unidirectional")
    assert rows(causal.make_layout(5)) == ["10000", "11000", "11100", "10110", "10011"]


@pytest.mark.parametrize("cls", [BigBirdSparsityConfig, VariableSparsityConfig])
@pytest.mark.parametrize("attention", ["bidirectional", "unidirectional"])
def test_random_blocks_are_those_of_the_seed_and_never_in_the_future(cls: Any, attention: str) -> None:
    options = {"num_heads": 3, "block": 1, "attention": attention, "different_layout_per_head": True}
    few = cls(**options, num_random_blocks=0).make_layout(40)
    many = cls(**options, num_random_blocks=5).make_layout(40)
    assert many.equal(cls(**options, num_random_blocks=5).make_layout(40))
    assert not many.equal(cls(**options, num_random_blocks=5, seed=1).make_layout(40))
    assert not many[0].equal(many[1])
    added = many - few
    assert int(added.min()) == 0
    assert int(added.sum(-1).max()) <= 5
    assert int(added.sum()) > 3 * 40 * 2
    assert (attention == "bidirectional") == bool(many.triu(1).sum() > few.triu(1).sum())


def test_longformer_has_a_window_and_given_global_blocks() -> None:
    config = BSLongformerSparsityConfig(num_heads=1, block=1, num_sliding_window_blocks=3, global_block_indices=[2])
    assert rows(config.make_layout(6)) == ["111000", "111000", "111111", "001110", "001111", "001011"]
    ranges = BSLongformerSparsityConfig(
        num_heads=1,
        block=1,
        num_sliding_window_blocks=1,
        global_block_indices=[0, 4],
        global_block_end_indices=[2, 9],
        attention="unidirectional",
    )
    assert rows(ranges.make_layout(6)) == ["100000", "110000", "111000", "110100", "111110", "111111"]


def test_a_sliding_window_reaches_half_its_width_to_both_sides() -> None:
    both = LocalSlidingWindowSparsityConfig(num_heads=1, block=1, attention="bidirectional").make_layout(4)
    assert rows(both) == ["1100", "1110", "0111", "0011"]
    assert rows(LocalSlidingWindowSparsityConfig(num_heads=1, block=1).make_layout(4)) == [
        *("1000", "1100", "0110", "0011"),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: FixedSparsityConfig(4, num_global_blocks=3),
            "num_global_blocks = 3 must divide num_local_blocks = 4",
        ),
        (lambda: FixedSparsityConfig(4, attention="both"), "'both' must be \"bidirectional\" or"),
        (
            lambda: FixedSparsityConfig(4, attention="unidirectional", horizontal_global_attention=True),
            'needs attention = "bidirectional"',
        ),
        (lambda: FixedSparsityConfig(4, num_different_global_patterns=2), "needs different_layout_per_head = True"),
        (
            lambda: FixedSparsityConfig(4, different_layout_per_head=True, num_different_global_patterns=5),
            "more than a window has: 4 blocks / 1 = 4",
        ),
        (lambda: VariableSparsityConfig(4, global_block_end_indices=[0]), "must have an end after each"),
        (lambda: VariableSparsityConfig(4, local_window_blocks=[]), "sizes of at least 1 block"),
        (lambda: BSLongformerSparsityConfig(4, global_block_end_indices=[1, 2]), "must have an end after each"),
        (lambda: DenseSparsityConfig(1, block=16).make_layout(20), "no whole number of blocks of 16; pad it to 32"),
        (lambda: BigBirdSparsityConfig(1, num_random_blocks=9).make_layout(64), "num_random_blocks = 9 is more than"),
        (lambda: BigBirdSparsityConfig(1, num_global_blocks=9).make_layout(64), "num_global_blocks = 9 is more than"),
        (
            lambda: BSLongformerSparsityConfig(1, num_sliding_window_blocks=5).make_layout(64),
            "num_sliding_window_blocks = 5 is more than the 4 blocks",
        ),
        (lambda: SparsityConfig(0), "num_heads = 0 and block = 16 must be at least 1"),
    ],
)
def test_arguments_that_contradict_each_other_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        make()


def test_a_pattern_of_ones_own_is_a_subclass() -> None:
    class Diagonal(SparsityConfig):
        def head_layout(self, head: int, num_blocks: int) -> torch.Tensor:
            return torch.eye(num_blocks, dtype=torch.bool)

    assert Diagonal(num_heads=2, block=4).make_layout(12).equal(torch.eye(3, dtype=torch.int64).expand(2, 3, 3))
    with pytest.raises(NotImplementedError, match="SparsityConfig has no pattern"):
        SparsityConfig(num_heads=2).make_layout(16)
