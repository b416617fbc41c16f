"""How good the model is on files it never saw, next to what plain counting achieves.

All figures are bits per byte over the same guesses, so they compare directly.  The yardsticks: a table of how often
each byte occurs (unigram) and a table of which byte follows which (bigram).  A model that does not beat the second
has learnt nothing that needs a network.
"""

from __future__ import annotations

import math

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
    batches = torch.split(windows[rank::world_size], BATCH)
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    if isinstance(engine, zengine.PipelineEngine):
        total += sum(loss * len(batch) for loss, batch in zip(losses_of(engine, batches), batches))
    else:
        total += _of_whole_models(engine, windows, rank, world_size)
    zcomm.all_reduce(total, groups.data(), label="validation")
    return total.item() / len(windows)


def _of_whole_models(engine: zengine.Engine, windows: Tensor, rank: int, world_size: int) -> Tensor:
    """The sum of the losses of this rank's windows, () float64."""
    engine.eval()
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for start in range(0, -(-len(windows) // world_size), BATCH):  # as many on each: they may ask others' experts
        batch = windows[rank::world_size][start : start + BATCH]
        loss = engine.module((batch if len(batch) else windows[:1]).to(engine.device))
        total += loss.double() * len(batch)
    engine.train()
    return total


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
