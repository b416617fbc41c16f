"""Steps of decoding: one call of C for all blocks and all sequences.

Problem.  At one token each matrix of a small model is read in a tenth of a millisecond, as long as a dozen calls of
an operator take; and four sequences cost four times as much if each reads the weights for itself.

Design.  Structs are made once and hold addresses; a step passes ids, lengths and the residual stream.  zq_decode.c
shares out the work and reads each weight once for all sequences.  With weights over ranks C is called once for each
exchange: twice a block for sums, four times where ranks join what they compute.

Rejected: a call for each block (the region of threads starts again 22 times a token); copies of the weights in one
buffer (twice the memory, and changes of the weights would not show).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zprecision.backends.native import is_addressable, library, num_threads
from zprecision.decoding.describe import Writer
from zprecision.decoding.shapes import check_block, check_head
from zprecision.decoding.values import (
    Activation,
    FusedBlock,
    FusedHead,
    FusedJoin,
    FusedMLP,
    FusedSum,
    unsupported,
)

__all__ = ["MOST_SEQUENCES", "FusedDecoder", "activate"]

MOST_SEQUENCES = 16  # of a step
_THREAD_BYTES = 2**16  # of a block, above which another thread is worth its waits


@final
class FusedDecoder:
    """Blocks and perhaps a head, as C reads them.

    Results depend on a sequence's own tokens only: not on the others of a step, slots, threads or instruction set.
    """

    def __init__(
        self,
        blocks: Sequence[FusedBlock],
        head: FusedHead | None,
        *,
        width: int,
        capacity: int,
    ) -> None:
        """width: of the residual stream.  capacity: positions of a slot of the caches.

        Raises ValueError for a value that the kernels cannot run, and for tensors that do not fit each other.
        """
        for value in (*blocks, *(() if head is None else (head,))):
            if reason := unsupported(value):
                raise ValueError(f"no kernels for this decoder: {reason}")
        for block in blocks:
            check_block(block, width, capacity)
        if head is not None:
            check_head(head, width)
        found = library()
        assert found is not None
        writer = Writer(found)
        self._blocks = found.ffi.new("zq_block[]", max(1, len(blocks)))
        self._decoder = found.ffi.new("zq_decoder *")
        for entry, block in zip(self._blocks, blocks):
            writer.block(entry, block, width)
        self._vocabulary = 0
        if head is not None:
            writer.head(self._decoder, head)
            self._vocabulary = head.projection.weight.shape[0]
        self._decoder.blocks, self._decoder.num_blocks = self._blocks, len(blocks)
        self._decoder.width, self._decoder.capacity = width, capacity
        self._decoder.num_parts = max(writer.num_parts)
        self._cuts = tuple(cut for index, block in enumerate(blocks) for cut in _cuts(index, block))
        self._found, self._width, self._num_blocks = found, width, len(blocks)
        self._num_slots, self._capacity = min((block.cache.keys.shape[0] for block in blocks), default=0), capacity
        # aliases keep the memory alive if a parameter gets another; `is_current` then says so
        self._tensors, self._structs = writer.tensors, writer.structs
        self._aliases = [each.detach() for each in writer.tensors]
        self._addresses = [each.data_ptr() for each in writer.tensors]
        self._most_threads = 1 + sum(each.nbytes for each in writer.tensors) // max(1, len(blocks)) // _THREAD_BYTES
        self._scratch = torch.empty(0, dtype=torch.uint8, device="cpu")

    @property
    def is_current(self) -> bool:
        """Whether all tensors are where they were when this was made."""
        return [each.data_ptr() for each in self._tensors] == self._addresses

    def run(
        self, x: Tensor, slots: Sequence[int], positions: Sequence[int], blocks: range, *, with_head: bool = False
    ) -> Tensor | None:
        """Advance (n, width) float32 in place through `blocks`; return the logits, (n, vocabulary), if asked for.

        Token i is that at positions[i] of slots[i]; its keys and values are written there.  n: up to MOST_SEQUENCES,
        of different slots.

        Raises ValueError for another shape or dtype of `x`, and for slots, positions, blocks or a head that do not
        exist; nothing is written then.
        """
        count = len(slots)
        if (
            x.shape != (count, self._width)
            or x.dtype != torch.float32
            or not x.is_contiguous()
            or not is_addressable(x)
        ):
            raise ValueError(f"run() needs contiguous float32 of ({count}, {self._width}), got {x.dtype} {x.shape}")
        if not 1 <= count <= MOST_SEQUENCES or len(set(slots)) != count or len(positions) != count:
            raise ValueError(f"run() takes 1 to {MOST_SEQUENCES} sequences, each in its own slot; got slots {slots}")
        self._check_places(slots, positions, blocks, with_head=with_head)
        ffi = self._found.ffi
        threads = max(1, min(num_threads(), self._most_threads))
        logits = torch.empty(count, self._vocabulary, dtype=torch.float32, device="cpu") if with_head else None
        step = ffi.new("zq_step *")
        held = ffi.new("int64_t[]", list(slots)), ffi.new("int64_t[]", list(positions))
        step.slots, step.positions = held
        step.tokens, step.x = count, ffi.cast("float *", x.data_ptr())
        step.scratch = ffi.cast("void *", self._memory(count, threads).data_ptr())
        self._run_parts(step, x, blocks, threads, logits)
        return logits

    def _run_parts(self, step: Any, x: Tensor, blocks: range, threads: int, logits: Tensor | None) -> None:
        """Call C for the stages of `blocks` up to each exchange between ranks, and then to the end."""
        ffi, lib = self._found.ffi, self._found.lib
        begin, end = 5 * blocks.start, 5 * blocks.stop
        cuts = [cut for cut in self._cuts if begin <= cut.stage < end]
        step.first_stage = begin
        if cuts:
            written, part = torch.empty_like(x), x.new_empty(x.shape[0] * max(cut.own_columns for cut in cuts))
            step.written, step.part = (ffi.cast("float *", each.data_ptr()) for each in (written, part))
            for cut in cuts:
                step.end_stage = cut.stage + 1
                lib.zq_run_step(self._decoder, step, threads)
                whole = cut.exchange(part[: x.shape[0] * cut.own_columns].view(x.shape[0], -1), written)
                step.whole = ffi.cast("float *", whole.data_ptr())  # `whole` lives until the next exchange
                step.first_stage = cut.stage + 1
        if logits is not None:
            step.logits = ffi.cast("float *", logits.data_ptr())
        step.end_stage = end
        lib.zq_run_step(self._decoder, step, threads)

    def _check_places(
        self, slots: Sequence[int], positions: Sequence[int], blocks: range, *, with_head: bool
    ) -> None:
        if blocks.step != 1 or not 0 <= blocks.start <= blocks.stop <= self._num_blocks:
            raise ValueError(f"run() got the blocks {blocks}; there are {self._num_blocks}")
        if with_head and not self._vocabulary:
            raise ValueError("run() was asked for logits, and this decoder has no head")
        if not blocks:
            return
        if not all(0 <= slot < self._num_slots for slot in slots):
            raise ValueError(f"run() got the slots {list(slots)}; the cache has {self._num_slots}")
        if not all(0 <= position < self._capacity for position in positions):
            raise ValueError(f"run() got the positions {list(positions)}; a slot has {self._capacity}")

    def _memory(self, tokens: int, threads: int) -> Tensor:
        need = int(self._found.lib.zq_step_bytes(self._decoder, tokens, threads))
        if self._scratch.numel() < need:
            self._scratch = torch.empty(need, dtype=torch.uint8, device="cpu")
        return self._scratch


@attrs.frozen(eq=False)
class _Cut:
    """An exchange between ranks."""

    stage: int  # after which it comes
    ranks: FusedSum | FusedJoin
    own_columns: int  # of `part`; 0: it is not used
    all_columns: int = 0  # of what the last projection reads; 0: the exchange is of what it gives

    def exchange(self, part: Tensor, written: Tensor) -> Tensor:
        """Replace `written` by that of all ranks, or return (n, all_columns), what they read."""
        if isinstance(self.ranks, FusedSum):
            self.ranks.add_up(written)
            return written
        if not self.all_columns:
            return written.copy_(self.ranks.join_outputs(part))
        whole = self.ranks.join_inputs(part).contiguous()
        if whole.shape != (part.shape[0], self.all_columns) or whole.dtype != torch.float32:
            raise ValueError(
                f"ranks joined {whole.dtype} of {tuple(whole.shape)}; the projection reads float32 of "
                f"{(part.shape[0], self.all_columns)}"
            )
        return whole


def _cuts(index: int, block: FusedBlock) -> Iterator[_Cut]:
    """Yield the exchanges of a block.  Its stages: heads, their projection, MLP, its last projection, addition."""
    heads, mlp = block.attention.num_heads * block.attention.head_size, block.mlp
    ends = [(0, block.out_ranks, block.attention.out, heads)]
    if isinstance(mlp, FusedMLP):
        grown = mlp.up.weight.shape[0] // (2 if mlp.is_fused else 1)
        ends.append((2, block.down_ranks, mlp.down, grown))
    elif block.down_ranks is not None:
        ends.append((2, block.down_ranks, mlp.experts[0].down, 0))
    for stage, ranks, last, columns in ends:
        if isinstance(ranks, FusedJoin):
            yield _Cut(5 * index + stage, ranks, columns, last.weight.shape[1])
            yield _Cut(5 * index + stage + 1, ranks, last.weight.shape[0])
        elif ranks is not None:
            yield _Cut(5 * index + stage + 1, ranks, 0)


def activate(act: Activation, x: Tensor, factors: Tensor | None = None) -> Tensor | None:
    """Return act(x) * factors as the kernels compute it, for contiguous float32 on a CPU; None without kernels.

    Raises ValueError for other tensors, and for factors of another shape.
    """
    found = library()
    if found is None:
        return None
    for each in (x, *(() if factors is None else (factors,))):
        if (
            each.dtype != torch.float32
            or not each.is_contiguous()
            or not is_addressable(each)
            or each.shape != x.shape
        ):
            raise ValueError(
                f"activate() needs contiguous float32 of {tuple(x.shape)} on a CPU, got {each.dtype} of "
                f"{tuple(each.shape)} on {each.device}"
            )
    out = torch.empty_like(x)

    def at(tensor: Tensor | None) -> Any:
        return found.ffi.NULL if tensor is None else found.ffi.cast("float *", tensor.data_ptr())

    found.lib.zq_activate(int(act), at(x), at(factors), at(out), x.numel())
    return out
