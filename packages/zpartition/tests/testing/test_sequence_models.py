"""The sequence model learns, and its pieces equal the whole."""

from __future__ import annotations

import pytest
import torch

import zcomm
from zcomm.testing import run_ranks
from zpartition.sequence import Order, Split
from zpartition.sequence.batches import SequenceBatches
from zpartition.testing.sequence_models import Reader, mean_over, ring, samples, ulysses


def _gradients(kind: str, order: Order) -> float:
    """The largest difference of the mean over ranks to one process, by the largest gradient."""
    size, rank = zcomm.group_size(), zcomm.group_rank()
    whole = Reader().double()
    attention = ulysses(None) if kind == "ulysses" else ring(None, order)
    pieces = Reader(attention, mean_over(None), num_tiles=3).double()
    (batch,) = samples(1)
    whole(**SequenceBatches([], Split()).piece(batch)).backward()
    pieces(**SequenceBatches([], Split(size, rank, order)).piece(batch)).backward()
    worst = scale = 0.0
    for a, b in zip(pieces.parameters(), whole.parameters()):
        zcomm.all_reduce(a.grad)
        worst = max(worst, float((a.grad / size - b.grad).abs().max()))
        scale = max(scale, float(b.grad.abs().max()))
    return worst / scale


@pytest.mark.parametrize(("kind", "order"), [("ulysses", Order.CONTIGUOUS), ("ring", Order.ZIGZAG)])
def test_pieces_have_the_gradients_of_the_whole(kind: str, order: Order) -> None:
    assert max(run_ranks(_gradients, 2, kind, order)) < 1e-12


def test_it_learns() -> None:
    model = Reader()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    losses = []
    for batch in samples(40):
        loss = model(**SequenceBatches([], Split()).piece(batch))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert sum(losses[-8:]) / 8 < 0.9 * losses[0]
