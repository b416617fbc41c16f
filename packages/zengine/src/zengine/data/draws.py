"""Random numbers of datasets: in which state the generators are while samples are made, and afterwards.

A dataset (augmentation, masking) draws from the generators of its process.  Ranks that share a copy of the model
have to be given the same samples, and their generators go apart: each draws its own dropout.  So there the draws of a
batch follow from the batch (`drawn_alike`), and the process's own generators do not notice.
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
    """What is drawn inside is not missing afterwards."""
    states = _states()
    try:
        yield
    finally:
        _put(states)


def drawn_alike(batches: Iterator[Any], *words: int) -> Iterator[Any]:
    """`batches`, which draw from generators of their own, seeded by `words` at first."""
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
