"""Block layouts of sparse attention: DeepSpeed's patterns, by its names and arguments.

A layout is a tensor (heads, blocks, blocks) of int64, 1 where the queries of a block of rows attend to the keys of a
block of columns; a block is `block` tokens long.

| class | a row of blocks attends to |
|---|---|
| `DenseSparsityConfig` | everything |
| `FixedSparsityConfig` | its window, and the last blocks of each window (Child and others 2019) |
| `VariableSparsityConfig` | its window, of windows of several sizes; given blocks; random ones |
| `BigBirdSparsityConfig` | a sliding window; the first blocks, which attend to everything; random ones |
| `BSLongformerSparsityConfig` | a sliding window; given blocks, which attend to everything |
| `LocalSlidingWindowSparsityConfig` | a sliding window |

"unidirectional" layouts have no block after the row's own; tokens of the row's own block still see each other, so a
causal model adds a mask of tokens (`attn_mask`).

Random blocks are drawn by `seed`, so ranks and runs have the same layout without a message; DeepSpeed draws them from
Python's random state and broadcasts.  Two of its slips are absent: random blocks of a unidirectional
`VariableSparsityConfig` never lie in the future, and rows with fewer than num_random_blocks blocks take all of them.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

__all__ = [
    "BSLongformerSparsityConfig",
    "BigBirdSparsityConfig",
    "DenseSparsityConfig",
    "FixedSparsityConfig",
    "LocalSlidingWindowSparsityConfig",
    "SparsityConfig",
    "VariableSparsityConfig",
]

Direction = Literal["bidirectional", "unidirectional"]


class SparsityConfig:
    """Base of the patterns: `num_heads` heads over blocks of `block` tokens.

    different_layout_per_head: heads have layouts of their own, where the pattern has several.

    Raises ValueError for sizes below 1.
    """

    def __init__(self, num_heads: int, block: int = 16, different_layout_per_head: bool = False) -> None:
        if num_heads < 1 or block < 1:
            raise ValueError(f"num_heads = {num_heads} and block = {block} must be at least 1")
        self.num_heads, self.block = num_heads, block
        self.different_layout_per_head = different_layout_per_head
        self.num_layout_heads = num_heads if different_layout_per_head else 1

    def setup_layout(self, seq_len: int) -> Tensor:
        """Return an empty layout for sequences of `seq_len` tokens.  Raises ValueError if blocks do not divide it."""
        if seq_len % self.block:
            raise ValueError(
                f"a sequence of {seq_len} tokens is no whole number of blocks of {self.block}; pad it to "
                f"{-(-seq_len // self.block) * self.block}"
            )
        num_blocks = seq_len // self.block
        return torch.zeros(self.num_heads, num_blocks, num_blocks, dtype=torch.int64)

    def make_layout(self, seq_len: int) -> Tensor:
        """Return the layout, (num_heads, seq_len / block, seq_len / block)."""
        layout = self.setup_layout(seq_len)
        for head in range(self.num_layout_heads):
            layout[head] = self.head_layout(head, layout.shape[1])
        return self.check_and_propagate_first_head_layout(layout)

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        """Return the layout of one head, (num_blocks, num_blocks) bool."""
        raise NotImplementedError(f"{type(self).__name__} has no pattern: use one of its subclasses, or define one")

    def check_and_propagate_first_head_layout(self, layout: Tensor) -> Tensor:
        """Give all heads the first one's layout, unless they have their own."""
        if not self.different_layout_per_head:
            layout[1:] = layout[0]
        return layout


class DenseSparsityConfig(SparsityConfig):
    """Every block attends to every block: for comparison."""

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        return torch.ones(num_blocks, num_blocks, dtype=torch.bool)


class FixedSparsityConfig(SparsityConfig):
    """Windows of num_local_blocks, and the last num_global_blocks of each window for everybody.

    horizontal_global_attention: these also attend to everything.  num_different_global_patterns: head h takes the
    blocks before those, (h modulo this) times.

    Raises ValueError for numbers of blocks or patterns that do not divide or fit.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_local_blocks: int = 4,
        num_global_blocks: int = 1,
        attention: Direction = "bidirectional",
        horizontal_global_attention: bool = False,
        num_different_global_patterns: int = 1,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        if num_local_blocks % num_global_blocks:
            raise ValueError(
                f"num_global_blocks = {num_global_blocks} must divide num_local_blocks = {num_local_blocks}"
            )
        _check_direction(attention, horizontal_global_attention)
        if num_different_global_patterns > 1 and not different_layout_per_head:
            raise ValueError(
                f"num_different_global_patterns = {num_different_global_patterns} needs different_layout_per_head = "
                "True: with one layout for all heads there is one pattern"
            )
        if num_different_global_patterns > num_local_blocks // num_global_blocks:
            raise ValueError(
                f"num_different_global_patterns = {num_different_global_patterns} is more than a window has: "
                f"{num_local_blocks} blocks / {num_global_blocks} = {num_local_blocks // num_global_blocks}"
            )
        self.num_local_blocks, self.num_global_blocks, self.attention = num_local_blocks, num_global_blocks, attention
        self.horizontal_global_attention = horizontal_global_attention
        self.num_different_global_patterns = num_different_global_patterns

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        layout = _windows(num_blocks, [self.num_local_blocks], self.attention)
        size, shift = self.num_global_blocks, 1 + head % self.num_different_global_patterns
        first = self.num_local_blocks - shift * self.num_global_blocks
        whole = num_blocks - num_blocks % self.num_local_blocks
        starts = [*range(first, whole, self.num_local_blocks)]
        if whole < num_blocks:  # a last window, which is short
            starts.append(min(whole + first, num_blocks - size))
        for start in starts:
            _add_global(layout, start, start + size, self.attention, self.horizontal_global_attention)
        return layout


class VariableSparsityConfig(SparsityConfig):
    """Windows of the sizes of local_window_blocks (the last one repeats), given global blocks and random ones.

    global_block_end_indices: with it, global_block_indices are the first blocks of ranges that end before these.

    Raises ValueError for empty windows, or ranges whose ends do not fit.
    """

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 0,
        local_window_blocks: Sequence[int] = (4,),
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Direction = "bidirectional",
        horizontal_global_attention: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_direction(attention, horizontal_global_attention)
        if not local_window_blocks or min(local_window_blocks) < 1:
            raise ValueError(f"local_window_blocks = {list(local_window_blocks)} must be sizes of at least 1 block")
        _ranges(global_block_indices, global_block_end_indices)
        self.num_random_blocks, self.local_window_blocks = num_random_blocks, local_window_blocks
        self.global_block_indices, self.global_block_end_indices = global_block_indices, global_block_end_indices
        self.attention, self.horizontal_global_attention, self.seed = attention, horizontal_global_attention, seed

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        layout = _windows(num_blocks, self.local_window_blocks, self.attention)
        _add_random(layout, self.num_random_blocks, self.attention, self.seed, head)
        for start, stop in _ranges(self.global_block_indices, self.global_block_end_indices):
            if start < num_blocks:
                _add_global(layout, start, stop, self.attention, self.horizontal_global_attention)
        return layout


class BigBirdSparsityConfig(SparsityConfig):
    """A sliding window, num_global_blocks first blocks that see and are seen by all, and random blocks."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_random_blocks: int = 1,
        num_sliding_window_blocks: int = 3,
        num_global_blocks: int = 1,
        attention: Direction = "bidirectional",
        seed: int = 0,
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_direction(attention, False)
        self.num_random_blocks, self.num_sliding_window_blocks = num_random_blocks, num_sliding_window_blocks
        self.num_global_blocks, self.attention, self.seed = num_global_blocks, attention, seed

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        layout = _sliding(num_blocks, self.num_sliding_window_blocks)
        _add_random(layout, self.num_random_blocks, self.attention, self.seed, head)
        _check_fits("num_global_blocks", self.num_global_blocks, num_blocks)
        layout[: self.num_global_blocks] = True
        layout[:, : self.num_global_blocks] = True
        return layout.tril() if self.attention == "unidirectional" else layout


class BSLongformerSparsityConfig(SparsityConfig):
    """A sliding window, and given blocks that see and are seen by all.  Ranges: see `VariableSparsityConfig`."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        different_layout_per_head: bool = False,
        num_sliding_window_blocks: int = 3,
        global_block_indices: Sequence[int] = (0,),
        global_block_end_indices: Sequence[int] | None = None,
        attention: Direction = "bidirectional",
    ) -> None:
        super().__init__(num_heads, block, different_layout_per_head)
        _check_direction(attention, False)
        _ranges(global_block_indices, global_block_end_indices)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention
        self.global_block_indices, self.global_block_end_indices = global_block_indices, global_block_end_indices

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        layout = _sliding(num_blocks, self.num_sliding_window_blocks)
        for start, stop in _ranges(self.global_block_indices, self.global_block_end_indices):
            layout[start:stop] = True
            layout[:, start:stop] = True
        return layout.tril() if self.attention == "unidirectional" else layout


class LocalSlidingWindowSparsityConfig(SparsityConfig):
    """A sliding window alone."""

    def __init__(
        self,
        num_heads: int,
        block: int = 16,
        num_sliding_window_blocks: int = 3,
        attention: Direction = "unidirectional",
    ) -> None:
        super().__init__(num_heads, block)
        _check_direction(attention, False)
        self.num_sliding_window_blocks, self.attention = num_sliding_window_blocks, attention

    def head_layout(self, head: int, num_blocks: int) -> Tensor:
        layout = _sliding(num_blocks, self.num_sliding_window_blocks)
        return layout if self.attention == "bidirectional" else layout.tril()


def _check_direction(attention: str, horizontal: bool) -> None:
    if attention not in ("bidirectional", "unidirectional"):
        raise ValueError(f'attention = {attention!r} must be "bidirectional" or "unidirectional"')
    if horizontal and attention != "bidirectional":
        raise ValueError(
            'horizontal_global_attention = True needs attention = "bidirectional": global blocks that attend to '
            "everything see the future"
        )


def _check_fits(name: str, value: int, num_blocks: int) -> None:
    if value > num_blocks:
        raise ValueError(f"{name} = {value} is more than the {num_blocks} blocks of the sequence; use at most those")


def _ranges(starts: Sequence[int], stops: Sequence[int] | None) -> list[tuple[int, int]]:
    """Return (first, end) of each range of global blocks.  Raises ValueError."""
    if stops is None:
        return [(start, start + 1) for start in starts]
    if len(starts) != len(stops) or any(start >= stop for start, stop in zip(starts, stops)):
        raise ValueError(
            f"global_block_end_indices = {list(stops)} must have an end after each of global_block_indices = "
            f"{list(starts)}"
        )
    return [*zip(starts, stops)]


def _windows(num_blocks: int, sizes: Sequence[int], attention: Direction) -> Tensor:
    """Return the layout of windows one behind the other; the last size repeats."""
    numbers: list[int] = []
    window = 0
    while len(numbers) < num_blocks:
        numbers += [window] * sizes[min(window, len(sizes) - 1)]
        window += 1
    own = torch.tensor(numbers[:num_blocks])
    layout = own[:, None] == own[None, :]
    return layout.tril() if attention == "unidirectional" else layout


def _sliding(num_blocks: int, width: int) -> Tensor:
    """Return the layout of width // 2 neighbours on both sides."""
    _check_fits("num_sliding_window_blocks", width, num_blocks)
    place = torch.arange(num_blocks)
    return (place[:, None] - place[None, :]).abs() <= width // 2


def _add_global(layout: Tensor, start: int, stop: int, attention: Direction, horizontal: bool) -> None:
    """Let all rows (from `start` on if unidirectional) attend to the blocks; horizontal: and these to all."""
    layout[0 if attention == "bidirectional" else start :, start:stop] = True
    if horizontal:
        layout[start:stop] = True


def _add_random(layout: Tensor, count: int, attention: Direction, seed: int, head: int) -> None:
    """Let each row attend to `count` random blocks, or to all if there are fewer."""
    num_blocks = len(layout)
    _check_fits("num_random_blocks", count, num_blocks)
    draws = random.Random(f"{seed} {head}")
    for row in range(num_blocks if count else 0):
        reach = num_blocks if attention == "bidirectional" else row + 1
        layout[row, draws.sample(range(reach), min(count, reach))] = True
