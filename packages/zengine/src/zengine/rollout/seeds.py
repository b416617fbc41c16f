"""Default seeds of samples.

The seeds of a prompt follow from the version of the weights, its tokens, and how often it was asked for with these
weights: the second time draws other samples than the first, in the same call or in a later one.  So one call of many
prompts, or of one prompt with n samples, draws what several calls would, on any rank.  The counts are in checkpoints:
a run that resumes draws what it would have drawn.

Rejected: a counter of calls (an evaluation in between would change the samples of training); a generator of the
process (samples would depend on batches and ranks).
"""

from __future__ import annotations

import collections
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import attrs

__all__ = ["DrawnPrompts"]

_SEEDS = 2**62


@final
@attrs.define(eq=False)
class DrawnPrompts:
    """How often each prompt was asked for, of this rank."""

    version: int = -1  # of the weights that `counts` are about
    counts: collections.Counter[str] = attrs.field(factory=collections.Counter)  # by digest of the tokens

    def seeds(
        self, prompts: Sequence[tuple[int, ...]], num_samples: int, version: int, seed: int | None = None
    ) -> list[tuple[int, ...]]:
        """Return the seeds of each prompt's samples; nothing is counted.

        seed: instead of the version and the counts of earlier calls: equal calls have equal seeds.
        """
        is_new = seed is not None or version != self.version
        counts = collections.Counter() if is_new else self.counts.copy()
        start = f"{version}" if seed is None else f"seed {seed}:"
        found = []
        for prompt in prompts:
            first = _digest(f"{start} {counts[name := _name(prompt)]} {prompt}") % _SEEDS
            found.append(tuple(first + index for index in range(num_samples)))
            counts[name] += 1
        return found

    def count(self, prompts: Iterable[tuple[int, ...]], version: int) -> None:
        """Count prompts whose `seeds` were used."""
        if version != self.version:
            self.version, self.counts = version, collections.Counter()
        self.counts.update(map(_name, prompts))

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON."""
        return {"version": self.version, "counts": dict(self.counts)}

    @classmethod
    def of_states(cls, states: Iterable[Mapping[str, Any]]) -> DrawnPrompts:
        """Return the counts of one rank, or the largest of several, for another number of ranks."""
        found = cls()
        for state in states:
            if state["version"] > found.version:
                found.version, found.counts = state["version"], collections.Counter()
            if state["version"] == found.version:
                found.counts |= collections.Counter(state["counts"])
        return found


def _name(prompt: tuple[int, ...]) -> str:
    return f"{_digest(str(prompt)):016x}"


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
