"""Rollouts of an engine: prompts in, samples and their log-probabilities out.

Phases of `rollout`: check the request by its numbers, on every rank, before weights move; open the weights; compute
each prompt once and its samples over the slots of one cache, refilled as samples end; compare a few samples with the
trainer's own forward; chart.

A sample is a function of weights, prompt and seed.  seeds.py says which seeds samples have by default.
"""

from __future__ import annotations

import functools
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, final

import attrs
import torch
from torch import Tensor, nn

import zcomm
from zengine.adapters import adapters_disabled
from zengine.inference.cache import KVCache
from zengine.inference.generation import CachedPass, Request
from zengine.inference.observe import tensors_in
from zengine.inference.structure import Decoder
from zengine.rollout.compare import Agreement, agreement, log_probs_of
from zengine.rollout.pending import PendingRollout, SampleProgress, SharedWork
from zengine.rollout.samples import Rollout, RolloutSample
from zengine.rollout.seeds import DrawnPrompts
from zengine.rollout.team import Split, Team
from zengine.rollout.values import RolloutConfig, SamplingConfig
from zengine.rollout.weights import PLACE, Storage, Weights

if TYPE_CHECKING:
    from zengine.engine.parts import Run

__all__ = ["Rollouts"]

Prompts = Sequence[Sequence[int]] | Sequence[Tensor] | Tensor
_REASONS = {
    Split.COPY: "hybrid_engine.inference_tp_size",
    Split.LAYERS: "their layers are split",
    Split.EXPERTS: "their experts are split",
}
_FILLER = RolloutSample(prompt_index=0, prompt=(0,), tokens=(0,), log_probs=(0.0,), seed=0, finish="length")


@final
@attrs.define(eq=False)
class _Counted:
    """A pass that counts its steps."""

    steps: CachedPass
    num_steps: int = 0
    num_prefilled: int = 0  # tokens of prompts

    @property
    def decoder(self) -> Decoder:
        return self.steps.decoder

    @property
    def cache(self) -> KVCache:
        return self.steps.cache

    def forward(self, ids: Tensor, slot: int) -> Tensor:
        self.num_prefilled += len(ids)
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
    team: Team
    config: RolloutConfig = attrs.field(factory=RolloutConfig)
    drawn: DrawnPrompts = attrs.field(factory=DrawnPrompts)

    def rollout(
        self,
        prompts: Prompts,
        *,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> Rollout:
        """Return `n` samples of each of this rank's prompts; see `DeepSpeedHybridEngine.rollout`."""
        found = self.begin(prompts, n=n, sampling=sampling, seeds=seeds, seed=seed).run()
        assert found is not None
        return found

    def begin(
        self,
        prompts: Prompts,
        *,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        seeds: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> PendingRollout:
        """Return a rollout without tokens yet, for `PendingRollout.run`.  Raises as `rollout`."""
        rule = sampling or SamplingConfig(max_new_tokens=128)
        count = rule.n_samples_per_prompt if n is None else n
        requests = self._requests(prompts, rule, count, seeds, seed)
        if seeds is None and seed is None:
            self.drawn.count((request.prompt for request in requests), self.weights.version())
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
        work = self._work(pending, slots, max_steps)
        reads_copy = bool(self.config.quantize) or self.weights.group.size > 1
        found = Agreement()
        with self._lent_states(), self.weights.open(holds_all=not reads_copy):
            # a later turn may have more samples, and a larger cache would begin empty
            num_slots = slots if self.weights.kept.needs_cache else min(slots, max(work.num_samples, 1))
            steps = _Counted(self._steps(num_slots))
            kept = self.weights.kept_sequences((self.config.exact, self.config.quantize))
            pending.decode(work, steps, max_steps, kept)
            done = pending.progress[: self.config.compare] if pending.is_done else []
            found = self._compare([each.sample() for each in done], is_collective=reads_copy)
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
            return self._trainer_log_probs(samples)

    def _steps(self, num_slots: int) -> CachedPass:
        if self.config.exact:
            return self.weights.exact_steps(num_slots)
        self.weights.leave_exact()
        return self.weights.steps(num_slots, self.config.quantize)

    @contextmanager
    def _lent_states(self) -> Iterator[None]:
        with self.lend_states() if self.config.offload_states else nullcontext():
            yield

    def _work(self, pending: PendingRollout, slots: int, max_steps: int) -> SharedWork:
        """Return what this rank, or all ranks of the split, decode now.  Raises ValueError on all if they differ."""
        team, size = self.team, self.team.ranks.size
        mode = {
            "num_slots": slots,
            "max_steps": max_steps,
            "quantize": self.config.quantize,
            "weights": pending.version,
        }
        if size == 1:
            return SharedWork.joined([pending.left()], 0)
        is_own = team.split is Split.LAYERS
        mine = mode, () if is_own else pending.left()
        by_rank = team.exchange(mine) if team.is_of_training else self.run.parts.exchange(mine)
        for rank, (other, _) in enumerate(by_rank):
            if other != by_rank[0][0]:
                raise ValueError(
                    f"{size} ranks decode together ({_REASONS[team.split]}), and rank {rank} has {other}, rank 0 "
                    f"{by_rank[0][0]}: give all the same"
                )
        if is_own:
            return SharedWork.joined([pending.left()], 0)
        first = 0 if team.is_of_training else zcomm.group_rank(self.run.parts.partition.group) // size * size
        return SharedWork.joined([left for _, left in by_rank[first : first + size]], team.ranks.rank)

    def _compare(self, samples: Sequence[RolloutSample], *, is_collective: bool) -> Agreement:
        """Compare with the trainer's forward, which gathers units at stage 3, so that ranks call it equally often.

        is_collective: units are gathered by the forward; else all are held.
        """
        trainer = self._trainer_log_probs(samples, is_collective=is_collective)
        return agreement(trainer, [sample.log_probs for sample in samples])

    def _trainer_log_probs(
        self, samples: Sequence[RolloutSample], *, is_collective: bool = False
    ) -> list[tuple[float, ...]]:
        """Return the trainer's log-probabilities; ranks whose forwards send messages compute equally many."""
        most = len(samples)
        if self.team.split is Split.EXPERTS:
            most = max(self.team.exchange(most))
        if is_collective and self.weights.storage is Storage.SHARDED:
            most = max(self.run.parts.exchange(most))
        log_probs_of(self.run.module, [_FILLER] * (most - len(samples)), self._run_trainer)
        return log_probs_of(self.run.module, samples, self._run_trainer)

    def _run_trainer(self, module: nn.Module, ids: Tensor) -> Tensor:
        """Return the logits of the trainer's forward, with its casts."""
        return next(tensors_in(self.run.parts.runner.forward(module, (ids,), {})))

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

    @property
    def are_gathered(self) -> bool:
        """Whether the next block over the weights gathers them, so that all ranks must enter it."""
        return self.weights.storage is Storage.SHARDED and not self.weights.depth

    # -- the request -----------------------------------------------------------------------------

    def _requests(
        self,
        prompts: Prompts,
        rule: SamplingConfig,
        count: int,
        seeds: Sequence[Sequence[int]] | None,
        seed: int | None,
    ) -> list[Request]:
        """Return the requests of this rank; ranks of sharded weights agree on mistakes first.  Raises ValueError."""
        problem, requests = "", []
        try:
            requests = self._checked_requests(prompts, rule, count, seeds, seed)
        except ValueError as error:
            problem = str(error)
        problem = self.team.problem(problem, requests)
        agree = self.weights.group.size > 1 or self.are_gathered
        problems = self.run.parts.exchange(problem) if agree else [problem]
        for rank, each in enumerate(problems):
            if each:
                raise ValueError(each if len(problems) == 1 else f"rank {rank}: {each}")
        return requests

    def _trainer_problem(self) -> str:
        """Return why the trainer's forward has no exact counterpart; "" if it has one."""
        zero = self.run.plan.zero
        if zero.weight_bits or zero.frozen_weight_bits:
            key = "zero_quantized_weights" if zero.weight_bits else "zero_quantized_nontrainable_weights"
            return (
                f"RolloutConfig(exact=True): {key} rounds the weights of training to 8 bits, and a "
                "rollout reads them unrounded; drop one of them"
            )
        if (dtype := self.run.plan.numerics.autocast) == torch.float32:
            return ""
        return (
            f"RolloutConfig(exact=True) computes in the dtype of the weights, and torch_autocast casts to {dtype}: "
            'drop torch_autocast, write "bf16": {"enabled": true} for weights of that dtype, or leave exact out'
        )

    def _checked_requests(
        self,
        prompts: Prompts,
        rule: SamplingConfig,
        count: int,
        seeds: Sequence[Sequence[int]] | None,
        seed: int | None,
    ) -> list[Request]:
        if self.config.exact and (problem := self.team.exact_problem() or self._trainer_problem()):
            raise ValueError(problem)
        if count < 1:
            raise ValueError(f"rollout(): n = {count}; ask for at least 1 sample of each prompt")
        tokens = _tokens_of(prompts)
        if seeds is not None and seed is not None:
            raise ValueError(f"rollout() got seed={seed} and seeds: pass one number, or one for each sample")
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
        made = self.drawn.seeds(tokens, count, self.weights.version(), seed)
        chosen = made if seeds is None else [tuple(each) for each in seeds]
        sampling = rule.rule()
        return [Request(prompt=prompt, sampling=sampling, seeds=own) for prompt, own in zip(tokens, chosen)]


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
