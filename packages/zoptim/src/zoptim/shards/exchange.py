"""Exchange: what an optimizer with compressed communication asks of the ranks.

After its warm-up 1-bit Adam averages momenta instead of gradients, so it needs what other optimizers do not: this
rank's own gradient, whole, and a compressed mean over ranks.  The package uses no process group; `Exchange` is the
whole interface.  Its owner makes one for flat shards of ZeRO stages 0 and 1; `WholeTensors` is the one for plain
torch, with any function that averages a list of tensors in place:

    reduce = zcomm.CompressedAllReduce(zcomm.SignLayout.packed([p.numel() for p in params], size), group)
    optimizer = zoptim.OneBitAdam(params)
    optimizer.connect(zoptim.WholeTensors(reduce.mean, all_reduce=...))

A *shard* is a tensor that the optimizer updates; *whole* is the tensor of which it is this rank's part (the shard
itself where nothing is sharded).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

__all__ = ["Exchange", "Place", "WholeTensors"]


class Place(Protocol):
    """Position of one tensor in a whole: elements [start, start + numel) of it, flattened."""

    @property
    def name(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Exchange(Protocol):
    """Communication of shards; every method but `places` and `own` may be a collective that all ranks call."""

    @property
    def world_size(self) -> int:
        """Number of ranks over which means are taken."""

    def connect(self, exact: Sequence[Tensor], compressed: Sequence[Tensor], *, fused: bool = False) -> None:
        """Prepare: means of `compressed` shards are compressed, those of `exact` ones are not.

        fused: all tensors share one scale.
        """

    def places(self, shard: Tensor) -> Sequence[Place]:
        """Return the tensors in the whole of a shard."""

    def gradients(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's own gradients, whole; zeros where a tensor has none."""

    def wholes(self, shards: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        """Return the wholes of which every rank has one part; the parts themselves where nothing is sharded."""

    def latest(self, shards: Sequence[Tensor]) -> list[Tensor] | None:
        """Return the result of the last `mean`, whole, if parts alone would have to be gathered; else None."""

    def mean(self, wholes: Sequence[Tensor]) -> None:
        """Replace the wholes of all compressed shards, in their order, by their compressed mean."""

    def exact_mean(self, wholes: Sequence[Tensor]) -> None:
        """Replace wholes by their mean."""

    def own(self, shard: Tensor, whole: Tensor) -> Tensor:
        """Return this rank's part of a whole, of the shard's shape."""

    def span(self, shard: Tensor) -> tuple[int, int]:
        """Return [lo, hi) of the flattened whole: this rank's part."""

    def total(self, numbers: Tensor) -> Tensor:
        """Return the sums of float64 numbers over the parts of wholes; the same on all ranks."""

    def total_of_model(self, number: Tensor) -> Tensor:
        """Return the sum of a float64 number over the parts of wholes, and over ranks with other tensors."""

    def largest(self, numbers: Tensor) -> Tensor:
        """Return the maxima of float64 numbers over the parts of wholes; the same on all ranks."""

    def rank_tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that differ between ranks (errors), by name; written in place when they are loaded."""

    def reset(self) -> None:
        """Forget what this rank has not sent yet."""


@attrs.frozen
class WholePlace:
    """A whole that is one tensor."""

    name: str
    start: int
    shape: tuple[int, ...]


def _keep(tensors: Sequence[Tensor]) -> None:
    """Average over one rank."""


@final
class WholeTensors:
    """Exchange of whole tensors; without arguments that of one rank."""

    def __init__(
        self,
        mean: Callable[[Sequence[Tensor]], object] = _keep,
        *,
        world_size: int = 1,
        exact_mean: Callable[[Sequence[Tensor]], object] = _keep,
        rank_tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make it.

        mean: replaces a list of tensors by their compressed mean over ranks.
        exact_mean: the same in full precision, for groups with `non_freeze`.
        rank_tensors: the state of `mean` on this rank; looked up whenever it is asked for.
        """
        self.world_size = world_size
        self._mean, self._exact_mean = mean, exact_mean
        self._rank_tensors: Mapping[str, Tensor] = {} if rank_tensors is None else rank_tensors
        self._names: dict[Tensor, str] = {}

    def connect(self, exact: Sequence[Tensor], compressed: Sequence[Tensor], *, fused: bool = False) -> None:
        """Name the tensors by their positions."""
        self._names = {tensor: str(index) for index, tensor in enumerate([*exact, *compressed])}

    def places(self, shard: Tensor) -> Sequence[Place]:
        return [WholePlace(self._names.get(shard, ""), 0, tuple(shard.shape))]

    def gradients(self, shards: Sequence[Tensor]) -> list[Tensor]:
        return [torch.zeros_like(shard) if shard.grad is None else shard.grad for shard in shards]

    def wholes(self, shards: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
        return list(parts)

    def latest(self, shards: Sequence[Tensor]) -> list[Tensor] | None:
        return None

    def mean(self, wholes: Sequence[Tensor]) -> None:
        self._mean(wholes)

    def exact_mean(self, wholes: Sequence[Tensor]) -> None:
        self._exact_mean(wholes)

    def own(self, shard: Tensor, whole: Tensor) -> Tensor:
        return whole

    def span(self, shard: Tensor) -> tuple[int, int]:
        return 0, shard.numel()

    def total(self, numbers: Tensor) -> Tensor:
        return numbers

    def total_of_model(self, number: Tensor) -> Tensor:
        return number

    def largest(self, numbers: Tensor) -> Tensor:
        return numbers

    def rank_tensors(self) -> Mapping[str, Tensor]:
        return self._rank_tensors

    def reset(self) -> None:
        for tensor in self._rank_tensors.values():
            tensor.zero_()
