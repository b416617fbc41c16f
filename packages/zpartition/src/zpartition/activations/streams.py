"""Named random number streams beside torch's own, with the names of Megatron's tracker.

Problem.  A layer that is split over tensor ranks by hand must draw different numbers on each of them, and whole
layers the same numbers, from one generator of the device.

Design.  A stream is a named state of that generator.  `fork(name)` sets it, and saves its new state at the end of the
block; torch's own sequence continues as if nothing had been drawn.  `zpartition.tensor` needs no streams: its layers
separate the numbers themselves.  `Checkpointing(streams=...)` restores all streams before a block is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

import attrs
import torch
from torch import Tensor

__all__ = ["MODEL_PARALLEL", "RandomStreams"]

MODEL_PARALLEL = "model-parallel-rng"  # the stream that differs between tensor ranks
_OFFSET = 2718  # of its seeds, from torch's own


@final
@attrs.define(eq=False)
class RandomStreams:
    """Streams of one device.  Invariant: names are unique, and so are seeds."""

    device: torch.device  # whose default generator draws
    states: dict[str, Tensor] = attrs.field(factory=dict)  # of each stream: the state of the generator, on the host
    seeds: set[int] = attrs.field(factory=set)
    own_seed: int = -1  # of MODEL_PARALLEL

    def add(self, name: str, seed: int) -> None:
        """Add a stream that starts with `seed`.

        Raises:
            ValueError: a stream with that name or that seed exists.
        """
        if seed in self.seeds:
            raise ValueError(
                f"seed {seed} is in use by another stream ({self._known_names()}); equal seeds draw equal numbers"
            )
        if name in self.states:
            raise ValueError(f"stream {name!r} exists already ({self._known_names()}); reset() removes all streams")
        self.seeds.add(seed)
        self.states[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Draw the device's numbers from the stream `name` inside.

        Raises:
            ValueError: there is no such stream.
        """
        if name not in self.states:
            raise ValueError(f"there is no stream {name!r}, only {self._known_names()}; create it by add(name, seed)")
        outside = self._get_state()
        self._set_state(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._get_state()
            self._set_state(outside)

    def get_states(self) -> dict[str, Tensor]:
        """Return all states by name; later draws do not change them."""
        return dict(self.states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states that `get_states` returned."""
        self.states = dict(states)

    def reset(self) -> None:
        """Remove all streams."""
        self.states, self.seeds = {}, set()

    def seed_model_parallel(self, seed: int, rank: int) -> None:
        """Seed torch's own numbers by `seed`, equal on all tensor ranks, and MODEL_PARALLEL by `seed` and `rank`."""
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        self.reseed(seed, rank)

    def reseed(self, seed: int, rank: int) -> None:
        """Restart MODEL_PARALLEL, as `seed_model_parallel` does."""
        self.states.pop(MODEL_PARALLEL, None)
        self.seeds.discard(self.own_seed)
        self.own_seed = seed + _OFFSET + rank
        self.add(MODEL_PARALLEL, self.own_seed)

    def _get_state(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set_state(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _known_names(self) -> str:
        return ", ".join(map(repr, self.states)) or "none"
