"""Random numbers that no other rank draws.

Sequence ranks are often seeded alike, and then heads (or blocks) that different ranks compute would drop the same
places.  Nothing has to agree: each mask is drawn by one rank.  So inside `own_stream` torch's generators are seeded
with a number that is drawn from the outer one and the rank.  Whoever puts the outer one back, as activation
checkpointing does, draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zpartition.cells import Cell

__all__ = ["drawn_seed", "draws", "own_stream"]

_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio of 64 bits: seeds of ranks lie far apart
_BITS = 2**63 - 1


def drawn_seed(rank: int) -> int:
    """A number from torch's CPU generator, which moves on, another one on each rank."""
    return (int(torch.randint(_BITS, ())) + rank * _STRIDE) % _BITS


@contextmanager
def own_stream(cell: Cell, device: torch.device) -> Iterator[None]:
    """Inside, the generators of the CPU and of `device` draw what no other rank of `cell` draws."""
    seed = drawn_seed(cell.rank)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def draws(attention: object, dropout: float) -> bool:
    """Whether an attention draws random numbers, as far as can be seen: it is told to, or has such layers."""
    if dropout > 0:
        return True
    layers = attention.modules() if isinstance(attention, nn.Module) else ()
    return any(getattr(layer, "p", 0) and layer.training for layer in layers if "Dropout" in type(layer).__name__)
