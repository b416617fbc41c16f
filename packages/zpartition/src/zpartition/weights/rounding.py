"""Rounded weights: modules see rounded values while the masters, which the optimizer updates, keep theirs.

Quantization-aware training rounds the weights after each update (mixture of quantization, for example).  Rounding
follows `publish`, when every rank can see a weight as a whole:

- Weights that each rank holds are rounded in place, on every rank alike.
- Units of stage 3 are gathered once more, exactly, one after the other; each rank keeps its span of the result.  So a
  scale of a whole weight has the bits of the other stages, and rounded weights are what modules, state dicts and
  exports gather.  The cost is one all-gather of the weights for each rounding.

Rejected: rounding when a unit is gathered, for the modules alone (exports would not have it, and each weight is
rounded at every use); exchanging the ranges of the parts instead (means of parts have other bits than the mean).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from zpartition.weights.sharded import ShardedStorage, Storage
from zpartition.weights.unshard import Unsharder

__all__ = ["Rounding", "check_roundable", "round_storages"]

Rounding: TypeAlias = Callable[[str, Tensor], None]


def check_roundable(storages: Sequence[Storage], names: Collection[str]) -> None:
    """Raise ValueError if a weight in `names` is the optimizer's own memory."""
    own = [storage for storage in storages if storage.shares_master]
    shared = [slot.name for storage in own for slot in storage.bucket.slots if slot.name in names]
    if shared:
        raise ValueError(
            f"{shared[0]} ({len(shared)} of {len(names)} weights) has no master of its own, so rounding it would "
            "change what the optimizer has learnt. Train 16-bit weights beside float32 masters"
        )


@torch.no_grad()
def round_storages(
    storages: Sequence[Storage], unsharder: Unsharder, rounding: Rounding, names: Collection[str]
) -> None:
    """Call `rounding(name, weight)` with each whole weight in `names`, to change in place; every rank calls."""
    for storage in storages:
        if not isinstance(storage, ShardedStorage):
            chosen = [slot for slot in storage.bucket.slots if slot.name in names]
            for slot in chosen:
                rounding(slot.name, storage.flat[slot.offset : slot.end].view(slot.shape))
            storage.rounded = storage.own_span.clone() if chosen else None
    for unit in unsharder.units.values():
        held = [s for s in unit.storages if s.is_trained and any(slot.name in names for slot in s.bucket.slots)]
        if not held:
            continue
        with unsharder.keep_unsharded([unit]):
            for storage in held:
                for slot, param in zip(storage.bucket.slots, storage.params):
                    if slot.name in names:
                        rounding(slot.name, param.data)
                storage.adopt_rounded()
