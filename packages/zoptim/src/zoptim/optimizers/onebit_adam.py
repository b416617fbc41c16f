"""1-bit Adam (Tang et al. 2021): Adam whose communication, after a warm-up, is one bit an element.

In the warm-up it is AdamW without bias correction, on gradients that are means over ranks.  Then second moments are
frozen, gradients are no longer reduced, and ranks exchange their momenta, compressed, with error feedback.  When that
begins is `freeze_step`, in calls of `step`, or "auto": the first time that the sum of all second moments changes by
less than 4% over 1 / (1 - beta2) calls.  DeepSpeed's guide takes 15 to 25% of all steps.

`needs_local_gradients` says what the next step expects of whoever reduces gradients.  The communication itself is an
`Exchange` (shards/exchange.py).

What all ranks must share is in the groups (`calls`, `frozen`), so it travels with options; what belongs to a rank
(errors) is the exchange's.

The kernel of Adam updates in the warm-up.  The compressed stage uses torch's operations: the code, not the update,
is its cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from zoptim import _compat
from zoptim.backends.signals import Signals, is_skipped, read_signals
from zoptim.checks import flag, integer
from zoptim.optimizers.adam import Adam
from zoptim.optimizers.base import Params
from zoptim.rules.onebit import is_settled, rate_of, variance_floor
from zoptim.shards.exchange import Exchange, WholeTensors
from zoptim.shards.ranks import Layout, Ranks
from zoptim.states.spec import StateSpec

__all__ = ["CompressedAdam", "OneBitAdam"]

AUTO = "auto"
IGNORED = ("bias_correction", "eps_inside_sqrt", "amsgrad", "cuda_aware", "comm_backend_name")
_BACKENDS = ("nccl", "mpi", "hccl", "compressed", "gloo")


class CompressedAdam(Adam):
    """The common part of 1-bit Adam, 0/1 Adam and 1-bit LAMB."""

    freeze_step: int | str = AUTO  # calls before the compressed stage
    ignored_options: ClassVar[tuple[str, ...]] = IGNORED  # of DeepSpeed, without effect
    num_counting_calls: ClassVar[int] = 1  # the first calls of a run, which only count
    fuses_message: ClassVar[bool] = False  # all tensors share one scale in a message
    keeps_whole_states: ClassVar[bool] = False  # needs all states on every rank
    _moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    kept_options: ClassVar[tuple[str, ...]] = (*Adam.kept_options, "exp_avg_mask", "non_freeze")
    _absent_options: ClassVar[Mapping[str, Any]] = {
        **Adam._absent_options,
        "calls": 0,
        "frozen": False,
        "variance": 0.0,
    }

    def __init__(
        self,
        params: Params,
        lr: float | Tensor,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        more: Mapping[str, Any],
    ) -> None:
        self._more = {"calls": 0, "frozen": False, **more}
        self._exchange: Exchange = WholeTensors()
        super().__init__(
            params, lr, betas, eps, weight_decay, decoupled_weight_decay=True, bias_correction=False, foreach=None
        )
        self.connect(self._exchange)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group.  `exp_avg_mask`: multiplied into momenta of its shape; `non_freeze`: never compressed."""
        for name, value in self._more.items():
            self.defaults.setdefault(name, value)
        super().add_param_group(param_group)

    # -- communication -----------------------------------------------------------------------------

    def connect(self, exchange: Exchange) -> None:
        """Communicate through `exchange` from now on."""
        self._exchange = exchange
        exchange.connect(self._shards(exact=True), self._shards(exact=False), fused=self.fuses_message)

    def place_on_ranks(self, segments: Layout, ranks: Ranks) -> None:
        """Accept flat shards; their positions come with `connect`."""
        self.clear_plans()

    @property
    def needs_local_gradients(self) -> bool:
        """True if the next step takes this rank's own gradients, and not means over ranks."""
        return bool(self.param_groups[0]["frozen"]) and self._exchange.world_size > 1

    def rank_tensors(self) -> Mapping[str, Tensor]:
        """Return tensors of this rank that other ranks do not have, by name; a checkpoint holds one of each rank."""
        return self._exchange.rank_tensors()

    def reset_ranks(self) -> None:
        """Forget what belongs to one rank: a checkpoint of another number of ranks is loaded."""
        self._exchange.reset()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See FlatOptimizer; then `follow_freeze_step`."""
        super().load_state_dict(state_dict)
        self.follow_freeze_step()

    def follow_freeze_step(self) -> None:
        """Return to the warm-up if the state that was loaded is frozen after fewer calls than `freeze_step`."""
        if self.freeze_step != AUTO and self.param_groups[0]["calls"] < self.freeze_step:
            for group in self.param_groups:
                group["frozen"] = False

    def _shards(self, *, exact: bool) -> list[Tensor]:
        groups = [group for group in self.param_groups if bool(group.get("non_freeze")) is exact]
        return [param for group in groups for param in group["params"]]

    # -- a step ------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter; return the closure's loss, or None.  All ranks call together.

        The first call of a run only counts (not of ZeroOneAdam).  In the compressed stage a missing gradient counts
        as 0, because every message carries all tensors.  Raises as Adam does.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        with torch.no_grad():
            signals = read_signals(self.grad_scale, self.found_inf)
            if self._is_skipped(signals):
                return None
            self._count()
            if self.param_groups[0]["calls"] > self.num_counting_calls:
                self._step(signals)
        return None

    def _step(self, signals: Signals) -> None:
        """Update after call number `calls` has been counted."""
        raise NotImplementedError

    def _adam_step(self) -> None:
        """Update all parameters as AdamW without bias correction."""
        super().step()

    def _count(self) -> None:
        for group in self.param_groups:
            group["calls"] += 1

    def _is_skipped(self, signals: Signals) -> bool:
        """Return whether any rank found a non-finite gradient."""
        if signals.found_inf is None or not self.needs_local_gradients:
            return is_skipped(signals)
        found = signals.found_inf.double().reshape(1)
        self._exchange.exact_mean([found])
        return bool(found)

    # -- for subclasses ------------------------------------------------------------------------------

    def _moment(self, shard: Tensor, name: str) -> Tensor:
        """Return a state of a shard, created if there is none."""
        index, position = self._position_of(shard)
        state = self._ready_state(index, position)
        if name not in state:
            state[name] = torch.zeros_like(shard.detach())
        found: Tensor = state[name]
        return found

    def _moments(self, shards: Sequence[Tensor], name: str) -> list[Tensor]:
        return [self._moment(shard, name) for shard in shards]

    def _local_gradients(self, shards: Sequence[Tensor], signals: Signals) -> list[Tensor]:
        """Return this rank's own gradients, whole, float32, divided by grad_scale."""
        found = [gradient.float() for gradient in self._exchange.gradients(shards)]
        return _compat.divide(found, signals.grad_scale)

    def _mask(self, shards: Sequence[Tensor], wholes: Sequence[Tensor]) -> None:
        """Multiply wholes by the masks of their groups."""
        for shard, whole in zip(shards, wholes):
            mask = self._group(shard).get("exp_avg_mask")
            if mask is None:
                continue
            for place in self._exchange.places(shard):
                numel = math.prod(place.shape)
                part = whole.view(-1)[place.start : place.start + numel]
                part.mul_(mask.to(part.device, part.dtype).expand(place.shape).reshape(-1))

    def begin_compression(self) -> None:
        """Give the second moments their floors, and begin the compressed stage.

        `step` calls it.  All states exist then, so whoever measures them on a sample may call it, too.
        """
        for shard in self._shards(exact=False):
            squares = self._moment(shard, "exp_avg_sq")
            (whole,) = self._exchange.wholes([shard], [squares])
            floors = torch.zeros_like(whole.view(-1))
            for place in self._exchange.places(shard):
                row = slice(place.start, place.start + math.prod(place.shape))
                floors[row] = variance_floor(whole.view(-1)[row])
            own = self._exchange.own(shard, floors.view(whole.shape))
            torch.maximum(squares, own.view(squares.shape), out=squares)
        self._exchange.reset()
        for group in self.param_groups:
            group["frozen"] = True

    def _group(self, shard: Tensor) -> dict[str, Any]:
        """Return the group of a shard."""
        return self.param_groups[self._position_of(shard)[0]]

    def _update_of(self, shard: Tensor, momentum: Tensor, squares: Tensor) -> Tensor:
        """Return lr (m / (sqrt(v) + eps) + decay p), which `_move` subtracts."""
        group = self._group(shard)
        update = momentum.float() / squares.float().sqrt().add_(group["eps"])
        if group["weight_decay"]:
            update.add_(shard, alpha=group["weight_decay"])
        return update.mul_(rate_of(group["lr"]))

    def _move(self, shard: Tensor, update: Tensor) -> None:
        """Subtract an update from the weights."""
        shard.sub_(update.to(shard.dtype))
        if shard in self._mirrors:
            self._mirrors[shard].detach().copy_(shard)

    def _exact_update(self, signals: Signals) -> None:
        """Update the groups with `non_freeze` by exact means."""
        shards = self._shards(exact=True)
        if not shards:
            return
        gradients = [gradient.clone() for gradient in self._local_gradients(shards, signals)]
        self._exchange.exact_mean(gradients)
        for shard, whole in zip(shards, gradients):
            beta1, beta2 = self._group(shard)["betas"]
            own = self._exchange.own(shard, whole)
            momentum, squares = self._moment(shard, "exp_avg"), self._moment(shard, "exp_avg_sq")
            momentum.mul_(beta1).add_(own, alpha=1 - beta1)
            squares.mul_(beta2).addcmul_(own, own, value=1 - beta2)
            self._move(shard, self._update_of(shard, momentum, squares))

    def _local_momenta(self, shards: Sequence[Tensor], signals: Signals) -> list[Tensor]:
        """Return beta1 m + (1 - beta1) g, whole, with this rank's own g; may be the state itself, changed."""
        wholes = self._exchange.latest(shards)
        if wholes is None:
            wholes = self._exchange.wholes(shards, self._moments(shards, "exp_avg"))
        else:
            self._mask(shards, wholes)
        for shard, whole, gradient in zip(shards, wholes, self._local_gradients(shards, signals)):
            beta1 = self._group(shard)["betas"][0]
            whole.mul_(beta1).add_(gradient.view(whole.shape), alpha=1 - beta1)
        return wholes

    def _is_warm(self) -> bool:
        """Return whether the warm-up ends with this call."""
        group = self.param_groups[0]
        if self.freeze_step != AUTO:
            return bool(group["calls"] >= self.freeze_step)
        every = max(2, round(1 / (1 - group["betas"][1]))) if group["betas"][1] < 1 else 2
        if group["calls"] % every:
            return False
        sums = [squares.double().sum() for squares in self._moments(self._shards(exact=False), "exp_avg_sq")]
        own = torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.float64)
        now = float(self._exchange.total_of_model(own))
        before = group["variance"]
        for each in self.param_groups:
            each["variance"] = now
        return is_settled(before, now)

    def _state_spec(self, group: Mapping[str, Any]) -> StateSpec:
        """Return Adam's state without step counts: nothing is corrected by them."""
        return self._make_state_spec(group, self._moment_names, squares=frozenset({"exp_avg_sq"}), counts=False)

    def _check_options(self, options: Mapping[str, Any]) -> None:
        super()._check_options(options)
        integer("calls", options.get("calls", 0))
        flag("frozen", options.get("frozen", False))


class OneBitAdam(CompressedAdam):
    """1-bit Adam (Tang et al. 2021): AdamW without bias correction until `freeze_step`, then with compressed momenta.

    lr >= 0; `freeze_step` calls of `step` before compression, at least 2, or "auto"; betas in [0, 1); eps >= 0;
    weight_decay >= 0, decoupled.  Accepted for DeepSpeed's configs and without effect: `bias_correction` (moments
    are never corrected), `eps_inside_sqrt`, `cuda_aware`, `comm_backend_name`.  `amsgrad` raises.  Group keys:
    `exp_avg_mask`, `non_freeze`.

    State of a parameter: `exp_avg`, `exp_avg_sq`, as Adam's.

    Raises ValueError or TypeError naming the argument that is out of range, RuntimeError for amsgrad.
    """

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        freeze_step: int | str = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **ignored: Any,
    ) -> None:
        check_ignored("1-bit Adam", ignored)
        self.freeze_step = check_freeze_step("freeze_step", freeze_step)
        super().__init__(params, lr, betas, eps, weight_decay, {"variance": 0.0})

    def _step(self, signals: Signals) -> None:
        if not self.param_groups[0]["frozen"]:
            self._adam_step()
            if self._is_warm():
                self.begin_compression()
            return
        self._exact_update(signals)
        shards = self._shards(exact=False)
        wholes = self._local_momenta(shards, signals)
        self._exchange.mean(wholes)
        self._mask(shards, wholes)
        for shard, whole in zip(shards, wholes):
            momentum, squares = self._moment(shard, "exp_avg"), self._moment(shard, "exp_avg_sq")
            momentum.copy_(self._exchange.own(shard, whole).view(momentum.shape))
            self._move(shard, self._update_of(shard, momentum, squares))


def check_ignored(name: str, given: Mapping[str, Any]) -> None:
    """Check the options that DeepSpeed's classes accept and ignore.

    Raises RuntimeError for amsgrad, as they do; TypeError for other names.
    """
    for option, value in given.items():
        if option not in IGNORED:
            raise TypeError(f"{name} has no option {option!r}; accepted without effect: {', '.join(IGNORED)}.")
        if option != "comm_backend_name":
            flag(option, value)
    if given.get("amsgrad"):
        raise RuntimeError(f"{name} does not support amsgrad; leave it out, or use Adam.")
    backend = given.get("comm_backend_name", _BACKENDS[0])
    if backend not in _BACKENDS:
        raise ValueError(
            f"comm_backend_name is {backend!r}; allowed: {', '.join(_BACKENDS)}. It has no effect: ranks communicate "
            "as the run does."
        )


def check_freeze_step(name: str, value: int | str) -> int | str:
    """Return a number of calls, at least 2 (the first only counts), or "auto"."""
    if value == AUTO:
        return AUTO
    if isinstance(value, str):
        raise ValueError(f'{name} is {value!r}; it must be a whole number >= 2 or "auto".')
    return integer(name, value, 2)
