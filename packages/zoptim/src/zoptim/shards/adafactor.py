"""Adafactor on shards: ranks sum the rows and columns of matrices that are cut over them.

See [Note: cut tensors] in ranks.py.  A step has three passes over this rank's gradients and two all-reduces:

    sums    squares by row and by column, and of the weights     -> all-reduce: rows + cols + 1 numbers per cut matrix
    clip    squares of the update that rows and columns give     -> all-reduce: one number per cut tensor
    apply   the update again, clipped, into the weights

Both all-reduces are float64, and their terms are rounded to float32 element by element before.  The sums thus do not
depend on the cuts except in the last bits of float64, and float32 results do not depend on the number of ranks.  Each
rank that holds a part of a matrix keeps all rows and columns, which are small; vectors keep the variance of their own
elements.

Rejected: storing the update between the last two passes (4 bytes per element of the shard, to save one pass of a rule
that is not chosen for speed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from zoptim.shards.ranks import CutTensor, Layout, Ranks, cut_tensors
from zoptim.shards.segments import Segment

__all__ = ["AdafactorShards", "ShardPart"]

_CHUNK_NUMEL = 1 << 20  # elements that are cast to float64 at once


@attrs.frozen(eq=False)
class ShardPart:
    """A segment in a step, with its options and state."""

    segment: Segment
    group: Mapping[str, Any]  # options
    shard: Tensor  # flat, with its gradient
    divisor: Tensor | None  # of the gradient, () on the shard's device
    state: Mapping[str, Tensor]  # views, `step` advanced; row_var (..., rows, 1), col_var (..., 1, cols), or variance

    @property
    def weight(self) -> Tensor:
        """The weights, a flat view of the shard."""
        return self.shard.detach()[self.segment.row]

    def gradient(self) -> Tensor:
        """Return the unscaled gradient, flat, in float32 or float64."""
        assert self.shard.grad is not None, "checked when the parts were collected"
        grad = _upcast(self.shard.grad[self.segment.row])
        grad = grad if self.divisor is None else grad / self.divisor
        return -grad if self.group["maximize"] else grad

    def share(self) -> float:
        """Return the weight of the newest squares in the moments."""
        return float(float(self.state["step"]) ** self.group["beta2_decay"])

    def epsilon(self) -> float:
        """Return eps[0], or the machine epsilon if it is None."""
        given = self.group["eps"][0]
        return torch.finfo(self.shard.dtype).eps if given is None else float(given)


@attrs.frozen(eq=False)
class Frame:
    """The smallest box around a part of a stack of matrices, so that sums by row and by column are plain reductions.

    The box has full rows of a single matrix, or whole matrices of a stack.
    """

    shape: tuple[int, int, int]  # (matrices, rows, cols)
    lead: int  # elements of the box before the part
    rows: slice  # of all rows of the stack, flattened
    matrices: slice  # of the stack

    @classmethod
    def around(cls, segment: Segment) -> Frame:
        """Return the frame of a segment that is not empty."""
        *stack, rows, cols = segment.shape
        lo, hi = segment.range
        if math.prod(stack) == 1:
            first, last = lo // cols, -(-hi // cols)
            return cls((1, last - first, cols), lo - first * cols, slice(first, last), slice(0, 1))
        size = rows * cols
        first, last = lo // size, -(-hi // size)
        return cls(
            (last - first, rows, cols), lo - first * size, slice(first * rows, last * rows), slice(first, last)
        )

    def embed(self, part: Tensor) -> Tensor:
        """Return `part`, flat, in a box of zeros."""
        if self.lead == 0 and part.numel() == math.prod(self.shape):
            return part.view(self.shape)
        framed = part.new_zeros(math.prod(self.shape))
        framed[self.lead : self.lead + part.numel()] = part
        return framed.view(self.shape)

    def extract(self, framed: Tensor, numel: int) -> Tensor:
        """Return the part, flat."""
        return framed.reshape(-1)[self.lead : self.lead + numel]


@attrs.frozen(eq=False)
class AdafactorShards:
    """The reductions of Adafactor over ranks."""

    ranks: Ranks
    device: torch.device  # of all shards
    places: dict[int, tuple[int, int]]  # of cut tensors: (position, number) of their sums in the message

    @classmethod
    def make(cls, layout: Layout, ranks: Ranks) -> AdafactorShards:
        """Plan the message for the tensors of `layout`."""
        tensors = {i: tensor for by_rank in layout.values() for i, tensor in cut_tensors(by_rank).items()}
        places, end = {}, 0
        for index, tensor in sorted(tensors.items()):
            if tensor.is_cut:
                places[index] = (end, _num_sums(tensor))
                end += _num_sums(tensor)
        return cls(ranks, next((shard.device for shard in layout), torch.device("cpu")), places)

    def update(self, parts: Sequence[ShardPart]) -> None:
        """Update all parts.  Phases: squares, moments; squares of the update; weights."""
        parts = [part for part in parts if part.segment.numel]
        sums = self._sum_over_ranks([_squares(part) for part in parts], parts, self.places)
        weights = [vector[-1:] for vector in sums]
        for part, vector in zip(parts, sums):
            _update_moments(part, vector)
        ones = {index: (position, 1) for position, index in enumerate(self.places)}
        updates = self._sum_over_ranks([_sum(_direction(part).square()).view(1) for part in parts], parts, ones)
        for part, weight, update in zip(parts, weights, updates):
            _apply(part, _root_mean_square(weight, part), _root_mean_square(update, part))

    def _sum_over_ranks(
        self, mine: list[Tensor], parts: Sequence[ShardPart], places: Mapping[int, tuple[int, int]]
    ) -> list[Tensor]:
        """Add the sums of each part to those of its tensor's other parts, in one all-reduce for all cut tensors."""
        if not places or self.ranks.world_size == 1:
            return mine
        message = torch.zeros(sum(numel for _, numel in places.values()), dtype=torch.float64, device=self.device)
        found = [places.get(part.segment.index) for part in parts]
        for vector, place in zip(mine, found):
            if place is not None:
                message[place[0] : sum(place)] += vector
        self.ranks.all_reduce(message)
        return [
            vector if place is None else message[place[0] : sum(place)].clone() for vector, place in zip(mine, found)
        ]


def _num_sums(tensor: CutTensor) -> int:
    """Return how many sums a tensor has: of its rows, its columns and its weights."""
    if len(tensor.shape) < 2:
        return 1
    *stack, rows, cols = tensor.shape
    return math.prod(stack) * (rows + cols) + 1


def _squares(part: ShardPart) -> Tensor:
    """Return float64 sums of squares: of the gradient by row and by column, and of the weights."""
    weights = _sum(_upcast(part.weight).square()).view(1)
    if len(part.segment.shape) < 2:
        return weights
    frame = Frame.around(part.segment)
    framed = frame.embed(part.gradient().square())
    *stack, rows, cols = part.segment.shape
    by_row = weights.new_zeros(math.prod(stack) * rows)
    by_row[frame.rows] = framed.sum(dim=2, dtype=torch.float64).view(-1)
    by_column = weights.new_zeros(math.prod(stack), cols)
    by_column[frame.matrices] = framed.sum(dim=1, dtype=torch.float64)
    return torch.cat([by_row, by_column.view(-1), weights])


def _update_moments(part: ShardPart, sums: Tensor) -> None:
    """Update the moments of a part in place: of a matrix by `sums`, of a vector by its squares."""
    state, share = part.state, part.share()
    if len(part.segment.shape) < 2:
        variance = state["variance"]
        variance.lerp_(part.gradient().square().view_as(variance).to(variance.dtype), share)
        return
    rows, cols = part.segment.shape[-2:]
    row_var, col_var = state["row_var"], state["col_var"]
    by_row, by_column = sums[: row_var.numel()] / cols, sums[row_var.numel() : -1] / rows
    row_var.lerp_(by_row.view_as(row_var).to(row_var.dtype), share)
    col_var.lerp_(by_column.view_as(col_var).to(col_var.dtype), share)


def _direction(part: ShardPart) -> Tensor:
    """Return the update before it is clipped, flat."""
    state, grad, eps = part.state, part.gradient(), part.epsilon()
    if len(part.segment.shape) < 2:
        variance = _upcast(state["variance"]).view(-1)
    else:
        frame = Frame.around(part.segment)
        cols = part.segment.shape[-1]
        row_var, col_var = _upcast(state["row_var"]), _upcast(state["col_var"])
        mean = row_var.mean(dim=-2, keepdim=True).clamp(min=eps).view(-1, 1, 1)[frame.matrices]
        by_row = row_var.view(-1)[frame.rows].view(frame.shape[0], -1, 1)
        estimate = by_row * col_var.view(-1, 1, cols)[frame.matrices] / mean
        variance = frame.extract(estimate, grad.numel())
    return grad * variance.clamp(min=eps * eps).rsqrt()


def _apply(part: ShardPart, weight_size: float, update_size: float) -> None:
    """Update the weights.  The sizes are root mean squares over the whole tensor."""
    group, weight = part.group, part.weight
    lr, step = float(group["lr"]), float(part.state["step"])
    relative_step = min(lr, step**-0.5) * max(group["eps"][1], weight_size)
    new = _upcast(weight) * (1 - lr * group["weight_decay"])
    weight.copy_(new.add_(_direction(part), alpha=-relative_step / max(1.0, update_size / group["d"])))


def _root_mean_square(total: Tensor, part: ShardPart) -> float:
    """Return the root mean square, given the sum of squares.  Synchronizes with the device."""
    return math.sqrt(float(total) / math.prod(part.segment.shape))


def _sum(tensor: Tensor) -> Tensor:
    """Return the sum, () float64, by chunks: sum(dtype=float64) to a scalar is 100 times slower than a cast."""
    return torch.stack([chunk.double().sum() for chunk in torch.split(tensor.reshape(-1), _CHUNK_NUMEL)]).sum()


def _upcast(tensor: Tensor) -> Tensor:
    """Return `tensor` in float32, or in float64 if it has that dtype."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
