"""Engine that trains and generates on one set of weights (the section `hybrid_engine`).

    engine, *_ = zengine.initialize(model=model, config={..., "hybrid_engine": {"enabled": True}})
    rollout = engine.rollout(prompts, n=8, sampling=SamplingConfig(max_new_tokens=64))
    loss = engine(batch); engine.backward(loss); engine.step()

`generate` has the arguments and results of the module's own, which the module's attribute `generate` leads to, too,
as in DeepSpeed.  Weights, optimizer and training mode are untouched by generation (see zengine/rollout/weights.py).

Traps of DeepSpeed's hybrid engine that are closed: a model that is not recognized generates by its own forward, with
a warning, and not silently; nothing is printed; no size of an earlier batch is kept; at stage 3 weights are gathered
once for all tokens, also without pin_parameters.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, final

import attrs
from torch import Tensor, nn

import zcomm
from zengine.config import Plan
from zengine.deepspeed_engine import DeepSpeedEngine, Value
from zengine.engine.feature import Feature
from zengine.engine.parts import Parts
from zengine.inference.calls.module_generate import ModuleGenerate, own_generate_of
from zengine.inference.calls.path import reject_length, reject_prompt
from zengine.inference.calls.transformers_style import (
    arguments_by_name,
    fused_generate,
    lengths_asked,
    own_generate,
    unfused_argument,
)
from zengine.rollout.copies import Units
from zengine.rollout.pending import PendingRollout
from zengine.rollout.rollouts import Prompts, Rollouts
from zengine.rollout.samples import Rollout, RolloutSample
from zengine.rollout.seeds import DrawnPrompts
from zengine.rollout.team import Team
from zengine.rollout.values import RolloutConfig, SamplingConfig
from zengine.rollout.weights import PLACE, Storage, Weights
from zpartition import ModelParallelGroup

__all__ = ["DeepSpeedHybridEngine"]

_BLOCKS = "generation runs over the module's own weights, and replaces no layer; leave it out"
_PARAMETERS = "generation reads the module's own weights: use engine.module.parameters()"
_SAMPLES = "engine.rollout(prompts, n=8) computes each prompt once for its samples"
_TIMES = 'engine.rollout(...).stats has times, and "wall_clock_breakdown": true those of training'
# DeepSpeed's names that the engine lacks, and what to do
_INSTEAD = {
    **dict.fromkeys(("convert_to_linear_transposed", "new_inference_container", "inference_policies"), _BLOCKS),
    **dict.fromkeys(("create_inference_module", "create_inference_containers"), _BLOCKS),
    **dict.fromkeys(("populate_all_inference_policies", "mp_group", "mp_replace", "inference_mp_group"), _BLOCKS),
    **dict.fromkeys(("layer_params", "lora_params", "layer_lora_params"), _PARAMETERS),
    **dict.fromkeys(("all_lora_params", "all_layers_params"), _PARAMETERS),
    **dict.fromkeys(("prepare_shared_prefill", "repeat_shared_prefill_cache"), _SAMPLES),
    **dict.fromkeys(("_training_latency", "_total_latency", "_iters"), _TIMES),
    "workspace": "the cache is freed after each call with hybrid_engine.release_inference_cache, and else kept",
}

log = logging.getLogger("zengine")


@final
class _PendingState(Feature):
    """Saves a rollout that has begun, and which prompts were drawn, of all ranks: a checkpoint has one state."""

    name = "rollout"

    def __init__(self, rollouts: Rollouts) -> None:
        self.rollouts = rollouts
        self.pending: PendingRollout | None = None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the pending rollout of each rank ({} stands for none), and what it has drawn.  A collective."""
        mine = {} if self.pending is None or self.pending.is_done else self.pending.state_dict()
        both = mine, self.rollouts.drawn.state_dict()
        ranks = zcomm.all_gather_object(both, self.rollouts.run.parts.groups.world())
        return {"ranks": [pending for pending, _ in ranks], "drawn": [drawn for _, drawn in ranks]}

    def prepare_load(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Return a function that restores this rank's rollout; another number of ranks drops all, with a warning."""
        world, states, drawn = self.rollouts.run.parts.world, state.get("ranks", []), state.get("drawn", [])
        if len(states) != world.world_size:
            if any(states) and world.rank == 0:
                log.warning(
                    "a rollout that %d ranks had begun is dropped: this run has %d", len(states), world.world_size
                )
            return partial(self._adopt, {}, drawn)
        return partial(self._adopt, states[world.rank], drawn[world.rank : world.rank + 1])

    def _adopt(self, state: Mapping[str, Any], drawn: Sequence[Mapping[str, Any]]) -> None:
        self.rollouts.weights.forget_sequences()
        self.rollouts.drawn = DrawnPrompts.of_states(drawn)
        self.pending = self.rollouts.restored(state) if state else None


@final
@attrs.frozen(eq=False)
class _ShardedUnits(Units):
    """Units of stage 3."""

    partition: Any  # that shards the weights

    def of(self, params: Sequence[nn.Parameter]) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.partition.unshard_hooks.units_of(params))

    def all(self) -> tuple[str, ...]:
        return tuple(self.partition.unsharder.units)

    def release(self) -> None:
        self.partition.unsharder.release_all()

    @contextmanager
    def held(self, names: Iterable[str]) -> Iterator[None]:
        partition = self.partition
        partition.check_weights_resident()
        partition.unshard_hooks.drop_finished()
        with partition.unsharder.keep_unsharded([partition.unsharder.units[name] for name in names]):
            yield


class DeepSpeedHybridEngine(DeepSpeedEngine):
    """`DeepSpeedEngine` that generates."""

    def __init__(self, module: nn.Module, parts: Parts, plan: Plan, features: tuple[Feature, ...] = ()) -> None:
        super().__init__(module, parts, plan, features)
        section, size = plan.hybrid_engine, plan.hybrid_engine.inference_tp_size
        ranks = parts.partition.group
        split = ModelParallelGroup(None) if size == 1 else ModelParallelGroup.of(zcomm.consecutive_group(size, ranks))
        self._units = _ShardedUnits(parts.partition) if plan.zero.shards_weights else Units()
        weights = Weights(
            module,
            capacity=section.max_out_tokens,
            version=lambda: self.clock.applied_steps,
            keeps_cache=not section.release_inference_cache,
            storage=Storage.SHARDED if plan.zero.shards_weights else Storage.WHOLE,
            hold=self._all_units_held,
            units=self._units,
            group=split,
        )
        self._rollouts = Rollouts(self._run, weights, self._lent_states, Team.of(module, split))
        self._pending = _PendingState(self._rollouts)
        self.add_feature(self._pending)
        self._told: set[str] = set()  # what was logged once
        self._own_generate = own_generate_of(module)  # the module's; None without one
        ModuleGenerate.attach(self, module)

    def rollout(
        self,
        prompts: Prompts,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        logprobs: bool = True,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
        config: RolloutConfig | None = None,
    ) -> Rollout:
        """Return samples of this rank's prompts, with the log-probability of each token.

        prompts: token ids of each prompt: lists, or tensors (time,).
        n: samples of a prompt; default: sampling.n_samples_per_prompt.
        logprobs: accepted for symmetry with other engines; they are always there.
        seeds: one for each sample of each prompt.
        seed: one number instead, for the same samples at every call.  By default seeds follow from the number of
            optimizer steps, the prompt, and how often it was asked for with these weights, so that every call draws
            new samples, and a resumed run those that it would have drawn.
        config: how to compute this rollout and those after it.

        At stage 3 every rank calls, with prompts of its own.  With inference_tp_size > 1, and where training splits
        experts, the ranks of a group compute the samples of all their prompts together, and each returns those of its
        own.  Ranks that share layers (tensor parallelism) give the same prompts, as in training.

        Raises:
            ValueError: on every rank of sharded weights, before any weight moves: a prompt that is empty or too long,
                seeds that do not match; or the module is no decoder that is recognized, with the reason.
        """
        if config is not None:
            self._rollouts.config = config
        self.clock.require_open("rollout")
        self._log_compiled()
        return self._rollouts.rollout(prompts, n=n, sampling=sampling, seeds=seeds, seed=seed)

    def begin_rollout(
        self,
        prompts: Prompts,
        n: int | None = None,
        sampling: SamplingConfig | None = None,
        *,
        seeds: Sequence[Sequence[int]] | None = None,
        seed: int | None = None,
    ) -> PendingRollout:
        """Return a rollout to run in parts: `pending.run(max_steps)` returns None until its samples have ended.

        `save_checkpoint` between two parts saves the tokens so far; after `load_checkpoint`, also at another stage,
        `pending_rollout` goes on with the bits of a run that never stopped.  Arguments and errors as of `rollout`.
        """
        self.clock.require_open("begin_rollout")
        self._log_compiled()
        found = self._rollouts.begin(prompts, n=n, sampling=sampling, seeds=seeds, seed=seed)
        self._pending.pending = found
        return found

    @property
    def pending_rollout(self) -> PendingRollout | None:
        """The rollout that was begun last, in this run or in the one that was loaded; None if it has ended."""
        found = self._pending.pending
        return None if found is None or found.is_done else found

    def log_probs(self, samples: Sequence[RolloutSample], *, reference: bool = False) -> list[tuple[float, ...]]:
        """Return the log-probability of each new token of `samples` by the present weights; all ranks call.

        reference: of the model without its adapters (LoRA), a frozen reference that costs no memory.
        """
        return self._rollouts.log_probs(samples, reference=reference)

    def opened(self) -> AbstractContextManager[None]:
        """Hold whole weights inside the block, so that several rollouts share one gather; all ranks enter it."""
        return self._rollouts.weights.open()

    def turns(self) -> AbstractContextManager[None]:
        """Continue sequences of earlier rollouts inside the block: of a prompt only what is new is computed.

            with engine.turns():
                first = engine.rollout(prompts, sampling=sampling)
                replies = [(*each.prompt, *each.tokens, *reply(each)) for each in first.samples]
                second = engine.rollout(replies, sampling=sampling)

        The cache keeps the last sequence of each of the config's `num_slots` slots until the block ends; an optimizer
        step, or a loaded checkpoint, forgets them.  With `RolloutConfig(exact=True)` samples and log-probabilities
        are those of a rollout of the whole prompts, bit for bit; without, up to the rounding of prefill and decoding.
        """
        return self._rollouts.weights.turns()

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate with the arguments and results of the module's own `generate`; all ranks call at stage 3.

        A module without one takes the arguments of `zengine.inference.calls.transformers_style.own_generate`.

        Raises:
            RuntimeError: (DeepSpeed's) the prompt exceeds max_out_tokens, or the new tokens do not fit behind it; at
                stage 3 on every rank, before weights move (in the first call, which recognizes the module, after).
            AttributeError: the module has no `generate` and is no decoder that is recognized.
        """
        weights, make = self._rollouts.weights, self._own_generate
        given = self._by_name(args, kwargs)
        is_first, is_shared = weights.skeleton is None, self._rollouts.are_gathered
        self._reject_lengths(given, is_shared=is_shared)
        if kwargs.get("synced_gpus") and not self._rollouts.team.is_of_training:
            kwargs["synced_gpus"] = False  # all weights are held, so a rank that ends needs not run on for the others
        with self._opened_for(given):
            path = weights.present_path()
            if path is not None and is_first:
                self._reject_lengths(given, is_shared=is_shared)
            if path is None:
                self._log_once(f"is not accelerated, and its own forward generates: {weights.reason}")
                if make is None:
                    raise AttributeError(
                        f"{type(self.module).__name__} has no generate() and is no decoder that is recognized: "
                        f"{weights.reason}"
                    )
                return make(*args, **kwargs)
            if make is None:
                return own_generate(path, *args, **kwargs)
            if not hasattr(self.module, "generation_config"):  # not that of Transformers
                return make(*args, **kwargs)
            given |= kwargs
            if other := unfused_argument(self.module, given, make):
                self._log_once(f"generates by its own forward: the fused path cannot do {other}")
                return make(**given)
            return fused_generate(path, self.module, given, make)

    @contextmanager
    def _opened_for(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Open the weights for a call of `generate`, and measure it."""
        begin, prompt = time.perf_counter(), given.get("input_ids", given.get("inputs"))
        if isinstance(prompt, Tensor) and prompt.dim() > 0:
            self._total_batch_size = prompt.shape[0] * self.parts.world.world_size
        with self._rollouts.weights.open():
            opened = time.perf_counter()
            yield
            end = time.perf_counter()
        self._gather_latency, self._generate_latency = opened - begin, end - opened

    # -- DeepSpeed's names -----------------------------------------------------------------------

    _total_batch_size: int | None = None  # prompts of the last `generate`, of all ranks
    _gather_latency = 0.0  # seconds until weights were whole in the last `generate`
    _generate_latency = 0.0  # seconds of the last `generate` after that
    is_lora_fused = Value[bool]("False: an update is never added to the weights of the module.", lambda _: False)
    Z3_enabled = Value[bool]("True at stage 3.", lambda e: e.plan.zero.shards_weights)
    gather_all_layers = Value[bool]("True: stage 3 gathers once for all tokens of a call.", lambda _: True)

    def fuse_lora_weight(self) -> None:
        """Do nothing: the module computes base + update, and generation merges both into a copy by itself."""

    unfuse_lora_weight = unfuse_lora_weight_non_pinned = fuse_lora_weight

    def retake_inference_cache(self) -> None:
        """Do nothing: generation allocates its cache when it needs one."""

    def __getattr__(self, name: str) -> Any:
        """Return the module's attribute.  The error for a name of DeepSpeed's says what to use instead."""
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            if name in _INSTEAD:
                raise AttributeError(f"DeepSpeed's {name} is not here: {_INSTEAD[name]}") from error
            raise

    # -- the rest --------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile as `DeepSpeedEngine.compile`; while rollouts are exact, training computes without it."""
        with self._rollouts.weights.exact_lifted():
            super().compile(*args, **kwargs)

    def close(self) -> None:
        """Give the module its own `generate` back, and close the engine."""
        ModuleGenerate.detach(self, self.module)
        self._rollouts.weights.leave_exact()
        super().close()

    def _all_units_held(self) -> AbstractContextManager[None]:
        """Keep all units of stage 3 gathered inside the block."""
        return self._units.held(self._units.all())

    def _by_name(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the module's `generate`, or of that which stands in for it, by name."""
        if self._own_generate is not None:
            return arguments_by_name(self.module, self._own_generate, args, kwargs)
        names = [*inspect.signature(own_generate).parameters][1:]
        return {**dict(zip(names, args)), **kwargs}

    def _reject_lengths(self, given: Mapping[str, Any], *, is_shared: bool) -> None:
        """Raise RuntimeError if prompts, or the new tokens behind them, are too many.

        is_shared: all ranks call, and all raise the error of one.
        """
        problem = self._length_problem(given)
        problems = self.parts.exchange(problem) if is_shared else [problem]
        for rank, each in enumerate(problems):
            if each:
                raise RuntimeError(f"rank {rank}: {each}" if is_shared else each)

    def _length_problem(self, given: Mapping[str, Any]) -> str:
        """Return what `_reject_lengths` raises; new tokens are judged once the module is recognized."""
        weights, prompt = self._rollouts.weights, given.get("input_ids", given.get("inputs"))
        try:
            if isinstance(prompt, Tensor):
                reject_prompt(prompt.shape[-1], weights.capacity, PLACE)
            if weights.skeleton is None or self._runs_own_forward(given):
                return ""
            longest, new = lengths_asked(self.module, given)
            if not new:
                return ""
            num_positions = weights.skeleton.max_positions
            limit = min(weights.capacity, num_positions or weights.capacity)
            reject_length(longest, new, limit, num_positions, PLACE)
        except RuntimeError as error:
            return str(error)
        return ""

    def _runs_own_forward(self, given: Mapping[str, Any]) -> bool:
        make = self._own_generate
        is_of_transformers = hasattr(self.module, "generation_config")
        return make is not None and (not is_of_transformers or bool(unfused_argument(self.module, given, make)))

    def _log_compiled(self) -> None:
        if self.is_compiled and self._rollouts.config.exact:
            self._log_once("computes without compile() while rollouts are exact: graphs add up in another order")

    def _log_once(self, what: str) -> None:
        if what not in self._told and self.parts.world.rank == 0:
            self._told.add(what)
            log.warning("hybrid_engine: %s %s", type(self.module).__name__, what)

    @contextmanager
    def _lent_states(self) -> Iterator[None]:
        """Move optimizer states and masters to the host inside the block."""
        self.offload_states(include=["optim_states", "hp_params"])
        try:
            yield
        finally:
            self.reload_states()
