"""Random state of datasets: the state of the generators while samples are made, and afterwards.

A dataset (augmentation, masking) draws from the generators of its process.  Ranks that share a copy of the model
need the same samples, but their generators diverge, as each draws its own dropout.  So there the draws of a batch
depend on the batch (`drawn_alike`), and the process's own generators are restored.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

__all__ = ["drawn_alike", "generators_untouched", "seed_generators"]


def seed_generators(*words: int) -> None:
    """Seed every generator that a dataset may draw from, by `words` (>= 0) alone."""
    drawn = np.random.SeedSequence(words).generate_state(4)
    random.seed(int(drawn[0]))
    np.random.seed(drawn[1])
    torch.default_generator.manual_seed(int(drawn[2]) << 32 | int(drawn[3]))


@contextmanager
def generators_untouched() -> Iterator[None]:
    """Restore the generators after the block."""
    states = _states()
    try:
        yield
    finally:
        _put(states)


def drawn_alike(batches: Iterator[Any], *words: int) -> Iterator[Any]:
    """Yield `batches`, which draw from generators of their own, seeded by `words` once."""
    with generators_untouched():
        seed_generators(*words)
        own = _states()
    while True:
        with generators_untouched():
            _put(own)
            try:
                batch = next(batches)
            except StopIteration:
                return
            own = _states()
        yield batch


def _states() -> tuple[Any, Any, torch.Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _put(states: tuple[Any, Any, torch.Tensor]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
