"""Bytes of an optimizer's states for each bucket, measured by steps on small samples.

An elementwise optimizer keeps as much for a flat span as for any other tensor of its length: one sample gives the
bytes per element.  For an optimizer that looks at shapes, samples with as many dimensions as a parameter, each of a
distinct length, show which dimensions each state has: the momentum all of them, Adafactor's rows all but the last.  A
state with no dimension of the parameter (block scales, say) is assumed to grow with the number of elements.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, final

import attrs
import torch
from torch.nn import Parameter

from zpartition.layout.layout import Bucket, Piece, Slot
from zpartition.layout.policy import ZeroPolicy
from zpartition.state.optimizer_state import shaped_class

__all__ = ["StateSizes"]

_SAMPLE_NUMEL = 1 << 16  # of a parameter on which an elementwise optimizer shows what it keeps
_LENGTHS = (61, 67, 13, 5, 3, 2)  # of the samples of one that looks at shapes
Make = Callable[[list[Parameter]], torch.optim.Optimizer]


@attrs.frozen
class _StateTensor:
    """One state tensor of a parameter with some number of dimensions."""

    dims: tuple[int, ...]  # those of the parameter that it has: () and all are the same, a part for each part
    item_bytes: float  # for each element of those dimensions

    def num_bytes(self, slot: Slot, numel: int) -> int:
        """Bytes of the state for `numel` elements of the parameter in `slot`."""
        if self.is_apart(len(slot.shape)):
            return round(numel * self.item_bytes)
        return round(math.prod(slot.shape[dim] for dim in self.dims) * self.item_bytes)

    def is_apart(self, num_dims: int) -> bool:
        """True if a shard of the parameter has a shard of the state."""
        return len(self.dims) in (0, num_dims)


@final
@attrs.frozen(eq=False)
class StateSizes:
    """Bytes of optimizer states, by bucket."""

    policy: ZeroPolicy
    make: Make | None = None  # None: there is no optimizer
    _samples: dict[tuple[Any, ...], list[torch.Tensor]] = attrs.field(factory=dict, init=False)  # by shape and dtype

    def of(self, bucket: Bucket) -> int:
        """Bytes for the shard of `bucket`, on the rank that has most."""
        if self.make is None:
            return 0
        dtype = self.policy.master_for(bucket.dtype)
        if self.is_elementwise:
            return round(bucket.span_numel * self._per_element(dtype))
        kinds = [self._kept(len(slot.shape), dtype) for slot in bucket.slots]
        sizes = {tuple(kept.item_bytes for kept in kind) for kind in kinds}
        is_apart = all(k.is_apart(len(slot.shape)) for slot, kind in zip(bucket.slots, kinds) for k in kind)
        if self.is_cut(bucket) and is_apart and len(sizes) == 1:
            return round(bucket.span_numel * sum(sizes.pop()))
        ranks = range(bucket.num_shards)
        return max(sum(self._of_piece(piece, dtype) for piece in bucket.pieces(rank)) for rank in ranks)

    @functools.cached_property
    def is_elementwise(self) -> bool:
        """True if the optimizer accepts flat spans."""
        assert self.make is not None
        optimizer = self.make([Parameter(torch.zeros(1, 1))])
        return bool(getattr(optimizer, "elementwise", not shaped_class(optimizer)))

    def is_cut(self, bucket: Bucket) -> bool:
        """True if the optimizer gets spans and not whole parameters."""
        is_narrow = self.policy.master_for(bucket.dtype) != bucket.dtype
        return bucket.num_shards > 1 or is_narrow or self.policy.offload.moves_states

    def _of_piece(self, piece: Piece, dtype: torch.dtype) -> int:
        kinds = self._kept(len(piece.slot.shape), dtype)
        return sum(kept.num_bytes(piece.slot, piece.numel) for kept in kinds)

    def _per_element(self, dtype: torch.dtype) -> float:
        states = self._sampled(_SAMPLE_NUMEL, dtype=dtype)
        return sum(state.nbytes for state in states) / _SAMPLE_NUMEL

    def _kept(self, num_dims: int, dtype: torch.dtype) -> tuple[_StateTensor, ...]:
        """Return the states of a parameter with `num_dims` dimensions."""
        shape = _LENGTHS[:num_dims]
        found = []
        for state in self._sampled(*shape, dtype=dtype):
            dims = tuple(shape.index(length) for length in state.shape if length in shape)
            found.append(_StateTensor(dims, state.nbytes / math.prod(shape[dim] for dim in dims or range(num_dims))))
        return tuple(found)

    def _sampled(self, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return the optimizer's state tensors, without counters, for a parameter of this shape; cached."""
        if (shape, dtype) not in self._samples:
            self._samples[shape, dtype] = self._stepped(*shape, dtype=dtype)
        return self._samples[shape, dtype]

    def _stepped(self, *shape: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Run one step on a sample parameter and return its state tensors.

        An optimizer with a compressed stage shows there what it keeps at most.
        """
        assert self.make is not None
        sample = Parameter(torch.zeros(shape, dtype=dtype))
        sample.grad = torch.ones_like(sample)
        optimizer = self.make([sample])
        optimizer.step()
        getattr(optimizer, "begin_compression", list)()
        kept: list[Any] = [value for value in optimizer.state[sample].values() if isinstance(value, torch.Tensor)]
        return [value for value in kept if value.dim()]
