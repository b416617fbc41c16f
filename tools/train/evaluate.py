"""Evaluation on held-out files, against two baselines without a network.

All figures are bits per byte over the same predictions, so they compare directly.  Baselines: the frequency of each
byte (unigram) and of each pair of bytes (bigram).  A model that does not beat the bigram table has learnt nothing
that needs a network.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import attrs
import torch
from torch import Tensor

import zcomm
import zengine
from zengine.progress import progress

from .pipelined import batch_losses
from .text import Corpus, bigram, bits_per_byte, unigram

LN2 = math.log(2)
BATCH = 16  # windows of one forward
EVALUATING = "evaluating on held-out windows"


@torch.no_grad()
def validation_loss(engine: zengine.Engine, windows: Tensor) -> float:
    """Return the mean loss in nats per byte over windows (n, context + 1) uint8.  A collective of all ranks.

    Each rank evaluates a part of the windows, on the module itself, so that the engine's timers see training only.
    """
    groups = engine.parts.groups  # ranks of one model replica evaluate the same windows
    rank, world_size = groups.get_data_parallel_rank(), groups.get_data_parallel_world_size()
    batches, counts = rank_batches(windows, rank, world_size)
    if isinstance(engine, zengine.PipelineEngine):
        with progress(EVALUATING):
            losses = batch_losses(engine, batches)
    else:
        losses = _module_losses(engine, batches)
    own = sum(loss * count for loss, count in zip(losses, counts, strict=True))
    total = torch.tensor(own, dtype=torch.float64, device=engine.device)
    zcomm.all_reduce(total, groups.data(), label="validation")
    return total.item() / len(windows)


def rank_batches(windows: Tensor, rank: int, world_size: int) -> tuple[list[Tensor], list[int]]:
    """Return the batches of a rank, and the number of windows that count in each.

    All ranks have the same number of batches, because a forward all-gathers weights and dispatches tokens to the
    experts of other ranks.  A rank without windows left evaluates one that does not count.
    """
    mine = windows[rank::world_size]
    batches = [mine[start : start + BATCH] for start in range(0, -(-len(windows) // world_size), BATCH)]
    return [batch if len(batch) else windows[:1] for batch in batches], [len(batch) for batch in batches]


def _module_losses(engine: zengine.Engine, batches: Sequence[Tensor]) -> list[float]:
    engine.eval()
    found = []
    with progress(EVALUATING, len(batches)) as advance:
        for batch in batches:
            found.append(engine.module(batch.to(engine.device)).double())
            advance()
    engine.train()
    losses: list[float] = torch.stack(found).tolist()
    return losses


@attrs.frozen(kw_only=True)
class Result:
    """Bits per byte on the held-out files."""

    unigram: float
    bigram: float
    model: float
    step: int  # optimizer steps that the model has had
    guesses: int  # bytes predicted by each of the three
    fingerprint: str  # of the text: results compare only for equal ones

    @property
    def beats_baseline(self) -> bool:
        return self.model < min(self.unigram, self.bigram)

    def table(self) -> str:
        rows = [("byte frequencies (unigram)", self.unigram), ("byte pairs (bigram)", self.bigram)]
        rows.append((f"model after {self.step} steps", self.model))
        width = max(len(name) for name, _ in rows)
        head = f"held-out text, {self.guesses:,} bytes".ljust(width) + "  bits/byte"
        lines = [f"{name:{width}}  {bits:9.3f}" for name, bits in rows]
        return "\n".join([head, "-" * len(head), *lines])


def final_result(engine: zengine.Engine, corpus: Corpus, windows: Tensor) -> Result:
    """Evaluate the model and both tables over the same held-out windows (n, context + 1) uint8.  A collective."""
    return Result(
        unigram=bits_per_byte(unigram(corpus.train), windows),
        bigram=bits_per_byte(bigram(corpus.train), windows),
        model=validation_loss(engine, windows) / LN2,
        step=engine.global_steps,
        guesses=windows[:, 1:].numel(),
        fingerprint=corpus.fingerprint,
    )
