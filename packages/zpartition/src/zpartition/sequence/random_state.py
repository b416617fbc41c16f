"""Random numbers of a single sequence rank.

Sequence ranks are often seeded alike, and then heads (or blocks) on different ranks would drop the same positions.
The ranks need not agree: each mask is drawn by one rank.  So `rank_random_state` seeds torch's generators with the
rank and a number drawn from the outer state.  Code that restores the outer state, as activation checkpointing does,
draws the same masks again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zpartition.layout.model_parallel import ModelParallelGroup

__all__ = ["draw_rank_seed", "rank_random_state", "uses_dropout"]

_STRIDE = 0x9E3779B97F4A7C15  # the golden ratio of 64 bits: seeds of ranks lie far apart
_BITS = 2**63 - 1


def draw_rank_seed(rank: int) -> int:
    """Draw a number from torch's CPU generator, which advances; it differs between ranks."""
    return (int(torch.randint(_BITS, ())) + rank * _STRIDE) % _BITS


@contextmanager
def rank_random_state(mp_group: ModelParallelGroup, device: torch.device) -> Iterator[None]:
    """Draw numbers that differ between the ranks of `mp_group` inside, on the CPU and on `device`."""
    seed = draw_rank_seed(mp_group.rank)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed(seed)
        yield


def uses_dropout(attention: object, dropout: float) -> bool:
    """Check if an attention draws random numbers: it gets a dropout rate, or has dropout layers."""
    if dropout > 0:
        return True
    layers = attention.modules() if isinstance(attention, nn.Module) else ()
    return any(getattr(layer, "p", 0) and layer.training for layer in layers if "Dropout" in type(layer).__name__)
