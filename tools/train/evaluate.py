"""How good the model is on files it never saw, next to what plain counting achieves.

All figures are bits per byte over the same guesses, so they compare directly.  The yardsticks: a table of how often
each byte occurs (unigram) and a table of which byte follows which (bigram).  A model that does not beat the second
has learnt nothing that needs a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

import zcomm
import zengine

from .pipelined import losses_of
from .text import Corpus, bigram, bits_per_byte, unigram

LN2 = math.log(2)
BATCH = 16  # windows of one forward


@torch.no_grad()
def validation_loss(engine: zengine.Engine, windows: Tensor) -> float:
    """Mean loss in nats per byte over windows (n, context + 1) uint8; every rank computes its share.

    Collective.  Goes past the engine to the module, so that the timers see training only.
    """
    groups = engine.parts.groups  # ranks that share a model look at the same windows
    rank, world_size = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
    batches, counts = shares(windows, rank, world_size)
    losses = losses_of(engine, batches) if isinstance(engine, zengine.PipelineEngine) else _each(engine, batches)
    own = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    total = torch.tensor(own, dtype=torch.float64, device=engine.device)
    zcomm.all_reduce(total, groups.data(), label="validation")
    return total.item() / len(windows)


def shares(windows: Tensor, rank: int, world_size: int) -> tuple[list[Tensor], list[int]]:
    """The batches of a rank, and how many windows of each count.

    There are as many on every rank, since they gather weights and ask others' experts together: one that has no
    windows left takes one that does not count.
    """
    mine = windows[rank::world_size]
    batches = [mine[start : start + BATCH] for start in range(0, -(-len(windows) // world_size), BATCH)]
    return [batch if len(batch) else windows[:1] for batch in batches], [len(batch) for batch in batches]


def _each(engine: zengine.Engine, batches: Sequence[Tensor]) -> list[float]:
    engine.eval()
    losses = torch.stack([engine.module(batch.to(engine.device)).double() for batch in batches])
    engine.train()
    found: list[float] = losses.tolist()
    return found


@attrs.frozen(kw_only=True)
class Result:
    """Bits per byte on the held-out files."""

    unigram: float
    bigram: float
    model: float
    step: int  # optimizer steps that the model has had
    guesses: int  # bytes that each of the three had to predict
    fingerprint: str  # of the text: results compare only for equal ones

    @property
    def wins(self) -> bool:
        return self.model < min(self.unigram, self.bigram)

    def table(self) -> str:
        rows = [("byte frequencies (unigram)", self.unigram), ("byte pairs (bigram)", self.bigram)]
        rows.append((f"model after {self.step} steps", self.model))
        width = max(len(name) for name, _ in rows)
        head = f"held-out text, {self.guesses:,} bytes".ljust(width) + "  bits/byte"
        lines = [f"{name:{width}}  {bits:9.3f}" for name, bits in rows]
        return "\n".join([head, "-" * len(head), *lines])


def final_result(engine: zengine.Engine, corpus: Corpus, windows: Tensor) -> Result:
    """Collective: the model and both tables over the same windows (n, context + 1) uint8 of held-out text."""
    return Result(
        unigram=bits_per_byte(unigram(corpus.train), windows),
        bigram=bits_per_byte(bigram(corpus.train), windows),
        model=validation_loss(engine, windows) / LN2,
        step=engine.global_steps,
        guesses=windows[:, 1:].numel(),
        fingerprint=corpus.fingerprint,
    )
