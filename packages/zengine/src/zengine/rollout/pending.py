"""A rollout that can stop and go on, in another process if need be.

Its state is a list of tokens for each sample.  A sample that was running is decoded again from its prompt, by the
same seeds, so it continues with the bits of one that never stopped; those that have ended are kept.  Rejected: saving
the cache (for a sample it has a thousand times the bytes of its tokens, and another world has other slots).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import attrs

from zengine.inference.cache import Forgotten
from zengine.inference.generation import Request, stream
from zengine.inference.sampling import Sampling
from zengine.rollout.samples import Rollout, RolloutSample, RolloutStats

__all__ = ["PendingRollout", "SampleProgress", "SharedWork"]


@final
@attrs.define(eq=False)
class SampleProgress:
    """One sample so far."""

    request: Request
    prompt_index: int
    seed: int
    tokens: list[int] = attrs.field(factory=list)
    log_probs: list[float] = attrs.field(factory=list)
    finish: str = ""  # "length" or "token" once it has ended

    def sample(self) -> RolloutSample:
        """Return it as a result."""
        return RolloutSample(
            prompt_index=self.prompt_index,
            prompt=self.request.prompt,
            tokens=tuple(self.tokens),
            log_probs=tuple(self.log_probs),
            seed=self.seed,
            finish=self.finish,
        )


def _rule_of(row: Mapping[str, Any]) -> Sampling:
    """Return the rule of a row of JSON."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in row.items()}
    return Sampling(**values)


@final
@attrs.frozen(eq=False)
class SharedWork:
    """What is left of a rollout, on all ranks that decode it together: one rank, unless copies are split."""

    requests: list[Request]
    known: list[list[int]]  # tokens that each sample of each request has already
    own: slice  # requests of this rank

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return sum(map(len, self.known))

    @classmethod
    def joined(cls, parts: Sequence[Sequence[Mapping[str, Any]]], rank: int) -> SharedWork:
        """Return the work of all ranks; parts: `PendingRollout.left` of each."""
        rows, begin = [row for part in parts for row in part], sum(map(len, parts[:rank]))
        requests = [
            Request(prompt=tuple(row["prompt"]), sampling=_rule_of(row["rule"]), seeds=tuple(row["seeds"]))
            for row in rows
        ]
        return cls(requests, [list(row["known"]) for row in rows], slice(begin, begin + len(parts[rank])))


@final
@attrs.define(eq=False)
class PendingRollout:
    """A rollout that has begun; `run` goes on."""

    advance: Callable[[PendingRollout, int], Rollout]  # of the engine: opens the weights and calls `decode`
    version: int  # of the weights
    progress: list[SampleProgress]  # of all samples, by prompt
    num_tokens: int = 0
    num_decode_steps: int = 0
    num_prefilled: int = 0
    duration_s: float = 0.0
    num_elsewhere: int = 0  # samples left on other ranks of a tensor split, which decode together

    def run(self, max_steps: int = 0) -> Rollout | None:
        """Decode until all samples have ended, and return them; or for `max_steps` steps (0: no limit).

        Returns None if samples are left.  At stage 3 every rank calls.  Raises RuntimeError if the weights were
        updated since the rollout began.
        """
        found = self.advance(self, max_steps)
        return found if self.is_done else None

    @property
    def is_done(self) -> bool:
        """Whether all samples have ended, those of the other ranks of a tensor split included."""
        return not self.num_elsewhere and all(each.finish for each in self.progress)

    def left(self) -> list[dict[str, Any]]:
        """Return what is left as JSON: a request for each prompt, and how many tokens its samples have."""
        return [
            {
                "prompt": list(own[0].request.prompt),
                "rule": attrs.asdict(own[0].request.sampling),
                "seeds": [each.seed for each in own],
                "known": [len(each.tokens) for each in own],
            }
            for own in self._left()
        ]

    def _left(self) -> list[list[SampleProgress]]:
        left: dict[int, list[SampleProgress]] = {}
        for each in self.progress:
            if not each.finish:
                left.setdefault(each.prompt_index, []).append(each)
        return list(left.values())

    def decode(self, work: SharedWork, steps: Any, max_steps: int, kept: Forgotten) -> None:
        """Decode over a pass that counts its steps; tokens that a sample had already are not counted.

        work: of all ranks; the samples of this one are recorded.
        kept: sequences that the slots of its cache have.
        """
        samples: list[list[SampleProgress]] = [[] for _ in work.requests]
        samples[work.own] = self._left()
        self.num_elsewhere = work.num_samples - sum(map(len, samples))
        begin, first = time.perf_counter(), steps.num_steps
        lengths: dict[tuple[int, int], int] = {}
        for event in (events := stream(steps, work.requests, kept=kept)):
            place = (event.request, event.sample)
            lengths[place] = lengths.get(place, 0) + 1
            if lengths[place] <= work.known[event.request][event.sample]:
                first = steps.num_steps
                continue
            if max_steps and steps.num_steps - first > max_steps:
                break
            if not samples[event.request]:
                self.num_elsewhere -= bool(event.finish)
                continue
            own = samples[event.request][event.sample]
            own.tokens.append(event.token)
            own.log_probs.append(event.log_prob)
            own.finish = event.finish
            self.num_tokens += 1
        events.close()  # the slots are empty from here on
        self.num_prefilled += steps.num_prefilled
        self.num_decode_steps += min(steps.num_steps - first, max_steps or steps.num_steps)
        self.duration_s += time.perf_counter() - begin

    def result(self, kl: float, max_delta: float) -> Rollout:
        """Return the samples, with the distance of some from the trainer's log-probabilities."""
        stats = RolloutStats(
            num_tokens=self.num_tokens,
            num_decode_steps=self.num_decode_steps,
            num_prefilled=self.num_prefilled,
            duration_s=self.duration_s,
            kl=kl,
            max_delta_log_prob=max_delta,
        )
        samples = tuple(each.sample() for each in self.progress)
        return Rollout(samples=samples, weights_version=self.version, stats=stats)

    # -- checkpoints -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "version": self.version,
            "counts": [self.num_tokens, self.num_decode_steps, self.num_prefilled],
            "duration_s": self.duration_s,
            "num_elsewhere": self.num_elsewhere,
            "progress": [
                {
                    "prompt": list(each.request.prompt),
                    "rule": attrs.asdict(each.request.sampling),
                    "prompt_index": each.prompt_index,
                    "seed": each.seed,
                    "tokens": list(each.tokens),
                    "log_probs": list(each.log_probs),
                    "finish": each.finish,
                }
                for each in self.progress
            ],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any], advance: Callable[[PendingRollout, int], Rollout]) -> PendingRollout:
        """Return the rollout that `state_dict` described."""
        rows: Sequence[Mapping[str, Any]] = state["progress"]
        progress = []
        for row in rows:
            request = Request(prompt=tuple(row["prompt"]), sampling=_rule_of(row["rule"]), seeds=(row["seed"],))
            tokens, log_probs = list(row["tokens"]), list(row["log_probs"])
            progress.append(
                SampleProgress(request, row["prompt_index"], row["seed"], tokens, log_probs, row["finish"])
            )
        num_tokens, num_steps, num_prefilled = state["counts"]
        found = cls(advance, state["version"], progress, num_tokens, num_steps, num_prefilled)
        found.duration_s, found.num_elsewhere = state["duration_s"], state["num_elsewhere"]
        return found
