"""0/1 Adam (Lu et al. 2022): 1-bit Adam without a warm-up, with growing intervals (rules/zero_one.py).

Second moments are updated from exact means at steps 1 to 16, 18, 20, ...; at other steps gradients are averaged in
one bit an element.  After `var_freeze_step` every rank updates its own weights and its own first moments, and every
`interval` steps the changes are averaged, compressed: weights, first moments and changes of ranks differ in between,
and every local step reads all second moments.  So it needs all states on every rank (ZeRO stage 0): there is nothing
that stage 1 could share out.

Rejected: stage 1 with a synchronization after every step, which is 1-bit Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from torch import Tensor

from zoptim.backends.signals import Signals
from zoptim.checks import integer
from zoptim.optimizers.base import Params
from zoptim.optimizers.onebit_adam import CompressedAdam, check_ignored
from zoptim.rules.onebit import rate_of
from zoptim.rules.zero_one import ZeroOneClock, ZeroOnePolicy
from zoptim.states.spec import StateSpec

__all__ = ["ZeroOneAdam"]

_COUNTS = ("var_interval", "var_counter", "local_interval", "local_counter")


class ZeroOneAdam(CompressedAdam):
    """0/1 Adam (Lu et al. 2022): lr >= 0; betas in [0, 1); eps >= 0; decoupled weight_decay >= 0; no bias correction.

    `var_freeze_step`: second moments are frozen after the next step.  `var_update_scaler`: updates of them before
    their interval doubles.  `local_step_scaler`: local steps before their interval doubles, up to
    `local_step_clipper`.  Options without effect and group keys as OneBitAdam's.

    State of a parameter: `exp_avg`, `exp_avg_sq`; after the freeze also `momentum_accumulator`, the change since the
    last synchronization, and `synchronized`, the weights then, so that no rounding separates the ranks.

    Raises ValueError or TypeError naming the argument that is out of range, RuntimeError for amsgrad.
    """

    num_counting_calls: ClassVar[int] = 0
    keeps_whole_states: ClassVar[bool] = True  # ranks update all weights by themselves
    _absent_options: ClassVar[Mapping[str, Any]] = {
        **CompressedAdam._absent_options,
        "var_interval": 1,
        "var_counter": 0,
        "local_interval": 1,
        "local_counter": 0,
        "rates": 0.0,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        **ignored: Any,
    ) -> None:
        check_ignored("0/1 Adam", ignored)
        self.policy = ZeroOnePolicy(
            var_freeze_step=integer("var_freeze_step", var_freeze_step, 1),
            var_update_scaler=integer("var_update_scaler", var_update_scaler, 1),
            local_step_scaler=integer("local_step_scaler", local_step_scaler, 1),
            local_step_clipper=integer("local_step_clipper", local_step_clipper, 1),
        )
        more = {"var_interval": 1, "var_counter": 0, "local_interval": 1, "local_counter": 0, "rates": 0.0}
        super().__init__(params, lr, betas, eps, weight_decay, more)

    @property
    def clock(self) -> ZeroOneClock:
        """The number of steps so far, and the intervals."""
        group = self.param_groups[0]
        return ZeroOneClock(step=group["calls"], frozen=group["frozen"], **{key: group[key] for key in _COUNTS})

    @property
    def needs_local_gradients(self) -> bool:
        """True if the next step takes this rank's own gradients, and not means over ranks."""
        return not self.clock.next_updates_variance and self._exchange.world_size > 1

    def rank_tensors(self) -> Mapping[str, Tensor]:
        """See CompressedAdam; between synchronizations also first moments, changes and weights."""
        found = dict(super().rank_tensors())
        clock = self.clock
        if self._exchange.world_size > 1 and clock.frozen and clock.step % clock.local_interval:
            for index, shard in enumerate(self._shards(exact=False)):
                found[f"weight.{index}"] = shard.detach()
                found[f"exp_avg.{index}"] = self._moment(shard, "exp_avg")
                found[f"momentum_accumulator.{index}"] = self._moment(shard, "momentum_accumulator")
        return found

    def reset_ranks(self) -> None:
        """See CompressedAdam; weights return to the last synchronization."""
        super().reset_ranks()
        for shard in self._shards(exact=False) if self.clock.frozen else ():
            self._moment(shard, "momentum_accumulator").zero_()
            self._put(shard, self._moment(shard, "synchronized"))
        for group in self.param_groups:
            group["rates"] = 0.0

    def _step(self, signals: Signals) -> None:
        clock = attrs.evolve(self.clock, step=self.clock.step - 1)  # before this call
        if clock.next_updates_variance:
            self._adam_step()
        else:
            self._compressed_step(clock, signals)
        after = clock.after_step(self.policy)
        for group in self.param_groups:
            group.update({key: getattr(after, key) for key in _COUNTS})
        if after.frozen and not clock.frozen:
            self.begin_compression()

    def begin_compression(self) -> None:
        """See CompressedAdam; the weights of now are those of the last synchronization."""
        super().begin_compression()
        for shard in self._shards(exact=False):
            self._moment(shard, "momentum_accumulator").zero_()
            self._moment(shard, "synchronized").copy_(shard.detach())

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        """Return the state before or after the freeze."""
        names = (*self._moment_names, "momentum_accumulator", "synchronized")[: 4 if group["frozen"] else 2]
        return self._make_state_spec(group, names, squares=frozenset({"exp_avg_sq"}), counts=False)

    def _put(self, shard: Tensor, weights: Tensor) -> None:
        """Replace the weights."""
        shard.detach().copy_(weights)
        if shard in self._mirrors:
            self._mirrors[shard].detach().copy_(shard)

    def _compressed_step(self, clock: ZeroOneClock, signals: Signals) -> None:
        shards = self._shards(exact=False)
        gradients = self._local_gradients(shards, signals)
        if not clock.frozen:
            gradients = [gradient.clone() for gradient in gradients]
            self._exchange.mean(gradients)
            self._mask(shards, gradients)
        self._exact_update(signals)
        for shard, whole in zip(shards, gradients):
            beta1 = self._group(shard)["betas"][0]
            momentum, squares = self._moment(shard, "exp_avg"), self._moment(shard, "exp_avg_sq")
            own = self._exchange.own(shard, whole).view(momentum.shape)
            momentum.mul_(beta1).add_(own, alpha=1 - beta1)
            update = self._update_of(shard, momentum, squares)
            if clock.frozen:
                self._moment(shard, "momentum_accumulator").sub_(update)
            self._move(shard, update)
        if clock.frozen:
            for group in self.param_groups:
                group["rates"] += rate_of(group["lr"])
        if clock.next_synchronizes:
            self._synchronize(shards)

    def _synchronize(self, shards: list[Tensor]) -> None:
        """Average the changes since the last synchronization, weighted by the roots of second moments."""
        sums = []
        for shard in shards:
            change = self._moment(shard, "momentum_accumulator")
            sums.append(change.mul_(self._roots(shard)))
        self._exchange.mean([total.view(-1) for total in sums])
        self._mask(shards, sums)
        for shard, total in zip(shards, sums):
            rates = self._group(shard)["rates"]
            if rates:
                self._moment(shard, "exp_avg").copy_(total).div_(-rates)
            synchronized = self._moment(shard, "synchronized")
            synchronized.add_(total / self._roots(shard))
            self._put(shard, synchronized)
            total.zero_()
        for group in self.param_groups:
            group["rates"] = 0.0

    def _roots(self, shard: Tensor) -> Tensor:
        eps = self._group(shard)["eps"]
        return self._moment(shard, "exp_avg_sq").sqrt().add_(eps)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        for name, low in (("var_interval", 1), ("var_counter", 0), ("local_interval", 1), ("local_counter", 0)):
            integer(name, options.get(name, low), low)
