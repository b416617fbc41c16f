"""Named streams of random numbers beside torch's own, under the names of Megatron's tracker.

Problem.  A layer that is split over tensor ranks by hand has to draw other numbers on each of them, and whole layers
the same, out of one generator of the device.

Design.  A stream is the state of that generator under a name.  `fork(name)` sets it, and keeps what it has become
behind the block; torch's own sequence goes on as if nothing had been drawn.  `zpartition.tensor` needs no streams:
its layers part the numbers themselves.  `Checkpointing(streams=...)` sets all of them back before a block runs again.
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
    """Streams of one device.  Invariant: the names are unique, and so are the seeds."""

    device: torch.device  # whose default generator draws
    states: dict[str, Tensor] = attrs.field(factory=dict)  # of each stream: the state of the generator, on the host
    seeds: set[int] = attrs.field(factory=set)
    own_seed: int = -1  # of MODEL_PARALLEL

    def add(self, name: str, seed: int) -> None:
        """A stream that begins with `seed`.

        Raises:
            ValueError: there is one of that name, or of that seed.
        """
        if seed in self.seeds:
            raise ValueError(f"seed {seed} is that of another stream ({self._known()}): equal seeds, equal numbers")
        if name in self.states:
            raise ValueError(f"stream {name!r} exists already ({self._known()}); reset() forgets all of them")
        self.seeds.add(seed)
        self.states[name] = torch.Generator(self.device).manual_seed(seed).get_state()

    @contextmanager
    def fork(self, name: str = MODEL_PARALLEL) -> Iterator[None]:
        """Inside, the device's numbers come from the stream `name`.

        Raises:
            ValueError: there is no such stream.
        """
        if name not in self.states:
            raise ValueError(f"there is no stream {name!r}, only {self._known()}: add(name, seed) makes one")
        outside = self._present()
        self._set(self.states[name])
        try:
            yield
        finally:
            self.states[name] = self._present()
            self._set(outside)

    def get_states(self) -> dict[str, Tensor]:
        """All states by name; nothing that happens later changes them."""
        return dict(self.states)

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """What `get_states` returned."""
        self.states = dict(states)

    def reset(self) -> None:
        """Forget all streams."""
        self.states, self.seeds = {}, set()

    def seed_model_parallel(self, seed: int, rank: int) -> None:
        """Torch's own numbers by `seed`, the same on all tensor ranks; those of MODEL_PARALLEL by seed and `rank`."""
        self.reset()
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)
        self.reseed(seed, rank)

    def reseed(self, seed: int, rank: int) -> None:
        """Begin MODEL_PARALLEL anew, as `seed_model_parallel` does."""
        self.states.pop(MODEL_PARALLEL, None)
        self.seeds.discard(self.own_seed)
        self.own_seed = seed + _OFFSET + rank
        self.add(MODEL_PARALLEL, self.own_seed)

    def _present(self) -> Tensor:
        return torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()

    def _set(self, state: Tensor) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(state, self.device)
        else:
            torch.set_rng_state(state)

    def _known(self) -> str:
        return ", ".join(map(repr, self.states)) or "none"
