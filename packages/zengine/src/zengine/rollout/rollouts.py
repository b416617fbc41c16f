"""Rollouts of an engine: prompts in, samples and their log-probabilities out.

Phases of `rollout`: check the request by its numbers, on every rank, before weights move; open the weights; compute
each prompt once and its samples over the slots of one cache, refilled as samples end; compare a few samples with the
trainer's own forward; chart.

A sample is a function of weights, prompt and seed.  Without seeds they follow from the number of optimizer steps, the
tokens of the prompt and the index of the sample, so a run that resumes draws the samples that it would have drawn,
on any rank, in any batch.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import attrs
from torch import Tensor

from zengine.adapters import adapters_disabled
from zengine.inference.cache import KVCache
from zengine.inference.generation import CachedPass, Request
from zengine.inference.structure import Decoder
from zengine.rollout.compare import Agreement, agreement, log_probs_of
from zengine.rollout.pending import PendingRollout, SampleProgress
from zengine.rollout.samples import Rollout, RolloutSample
from zengine.rollout.values import RolloutConfig, SamplingConfig
from zengine.rollout.weights import PLACE, Storage, Weights

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["Rollouts"]

Prompts = Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
_SEEDS = 2**62


@final
@attrs.define(eq=False)
class _Counted:
    """A pass that counts its steps."""

    steps: CachedPass
    num_steps: int = 0

    @property
    def decoder(self) -> Decoder:
        return self.steps.decoder

    @property
    def cache(self) -> KVCache:
        return self.steps.cache

    def forward(self, ids: Tensor, slot: int) -> Tensor:
        return self.steps.forward(ids, slot)

    def forward_each(self, ids: Tensor, slots: Sequence[int]) -> Tensor:
        self.num_steps += 1
        return self.steps.forward_each(ids, slots)


@final
@attrs.define(eq=False)
class Rollouts:
    """Generation with the weights of one engine."""

    run: Run
    weights: Weights
    lend_states: Callable[[], AbstractContextManager[None]]  # optimizer states rest on the host inside
    config: RolloutConfig = attrs.field(factory=RolloutConfig)

    def rollout(
        self,
        prompts: Prompts,
        *,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> Rollout:
        """Return `n` samples of each of this rank's prompts; see `DeepSpeedHybridEngine.rollout`."""
        found = self.begin(prompts, n=n, sampling=sampling, seeds=seeds).run()
        assert found is not None
        return found

    def begin(
        self,
        prompts: Prompts,
        *,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
    ) -> PendingRollout:
        """Return a rollout without tokens yet, for `PendingRollout.run`.  Raises as `rollout`."""
        rule = sampling or SamplingConfig(max_new_tokens=128)
        count = rule.n_samples_per_prompt if n is None else n
        requests = self._requests(prompts, rule, count, seeds)
        progress = [
            SampleProgress(request, index, seed) for index, request in enumerate(requests) for seed in request.seeds
        ]
        slots = rule.continuous_batch_size or self.config.num_slots
        return PendingRollout(functools.partial(self.advance, slots), self.weights.version(), progress)

    def restored(self, state: Mapping[str, Any]) -> PendingRollout:
        """Return the rollout that `PendingRollout.state_dict` described."""
        return PendingRollout.of_state(state, functools.partial(self.advance, self.config.num_slots))

    def advance(self, slots: int, pending: PendingRollout, max_steps: int) -> Rollout:
        """Decode the samples that are left, for `max_steps` (0: all), and compare and chart when they have ended."""
        if pending.version != self.weights.version():
            raise RuntimeError(
                f"a rollout began with the weights of step {pending.version}, and they are those of step "
                f"{self.weights.version()}: begin another one"
            )
        num_left = sum(not each.finish for each in pending.progress)
        found = Agreement()
        with self._lent_states(), self.weights.open():
            steps = _Counted(self._steps(min(slots, max(num_left, 1))))
            pending.decode(steps, max_steps)
            if pending.is_done:
                found = self._compare([each.sample() for each in pending.progress[: self.config.compare]])
        rollout = pending.result(found.kl, found.max_delta)
        if pending.is_done:
            self._chart(rollout)
        return rollout

    def log_probs(self, samples: Sequence[RolloutSample], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Return the log-probability of each new token by the trainer's forward, in eval mode, without gradients.

        reference: of the model without its adapters.  At stage 3 every rank calls.
        """
        module = self.run.module
        base = adapters_disabled(module) if reference else nullcontext()
        with self.weights.open(), base:
            return log_probs_of(module, samples)

    def _steps(self, num_slots: int) -> CachedPass:
        if self.config.exact:
            return self.weights.exact_steps(num_slots)
        self.weights.leave_exact()
        return self.weights.steps(num_slots, self.config.quantize)

    @contextmanager
    def _lent_states(self) -> Iterator[None]:
        with self.lend_states() if self.config.offload_states else nullcontext():
            yield

    def _compare(self, samples: Sequence[RolloutSample]) -> Agreement:
        trainer = log_probs_of(self.run.module, samples)
        return agreement(trainer, [sample.log_probs for sample in samples])

    def _chart(self, rollout: Rollout) -> None:
        stats, step = rollout.stats, self.run.clock.steps
        num_samples = max(len(rollout.samples), 1)
        self.run.parts.telemetry.write_events(
            [
                ("rollout/kl", stats.kl, step),
                ("rollout/max_delta_log_prob", stats.max_delta_log_prob, step),
                ("rollout/tokens_per_second", stats.tokens_per_second, step),
                ("rollout/mean_length", stats.num_tokens / num_samples, step),
            ]
        )

    # -- the request -----------------------------------------------------------------------------

    def _requests(
        self, prompts: Prompts, rule: SamplingConfig, count: int, seeds: Sequence[Sequence[int]] | None
    ) -> list[Request]:
        """Return the requests of this rank; ranks of sharded weights agree on mistakes first.  Raises ValueError."""
        problem, requests = "", []
        try:
            requests = self._checked_requests(prompts, rule, count, seeds)
        except ValueError as error:
            problem = str(error)
        agree = self.weights.storage is Storage.SHARDED and not self.weights.depth
        problems = self.run.parts.exchange(problem) if agree else [problem]
        for rank, each in enumerate(problems):
            if each:
                raise ValueError(each if len(problems) == 1 else f"rank {rank}: {each}")
        return requests

    def _checked_requests(
        self, prompts: Prompts, rule: SamplingConfig, count: int, seeds: Sequence[Sequence[int]] | None
    ) -> list[Request]:
        if count < 1:
            raise ValueError(f"rollout(): n = {count}; ask for at least 1 sample of each prompt")
        tokens = _tokens_of(prompts)
        if seeds is not None and [len(each) for each in seeds] != [count] * len(tokens):
            raise ValueError(
                f"rollout(): seeds must be {count} numbers for each of the {len(tokens)} prompts; their lengths are "
                f"{[len(each) for each in seeds]}"
            )
        most = self.weights.most_tokens
        for index, prompt in enumerate(tokens):
            if not prompt:
                raise ValueError(f"prompt {index} has no tokens; give at least one")
            if len(prompt) + rule.max_new_tokens - 1 > most:
                raise ValueError(
                    f"prompt {index} has {len(prompt)} tokens and may get {rule.max_new_tokens} more; a sequence may "
                    f"have {most + 1} ({PLACE}, and the positions of the model): raise it, shorten the prompt, or "
                    f"ask for at most {max(most - len(prompt) + 1, 0)} new tokens"
                )
        made = [self._seeds(prompt, count, tokens[:index].count(prompt)) for index, prompt in enumerate(tokens)]
        chosen = made if seeds is None else [tuple(each) for each in seeds]
        sampling = rule.rule()
        return [Request(prompt=prompt, sampling=sampling, seeds=own) for prompt, own in zip(tokens, chosen)]

    def _seeds(self, prompt: tuple[int, ...], count: int, occurrence: int) -> tuple[int, ...]:
        key = f"{self.weights.version()} {occurrence} {prompt}".encode()
        first = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") % _SEEDS
        return tuple(first + index for index in range(count))


def _tokens_of(prompts: Prompts) -> list[tuple[int, ...]]:
    """Return the token ids of each prompt.  Raises ValueError for text, and for a prompt without a list around it."""
    try:
        return [tuple(operator.index(token) for token in prompt) for prompt in prompts]
    except TypeError:
        raise ValueError(
            "rollout(): prompts must be a list of prompts, each the token ids of one: [[1, 2, 3], [4, 5]], or "
            f"tensors (time,); it is {reprlib.repr(prompts)}. Encode text by the tokenizer first, and put one prompt "
            "into a list"
        ) from None
