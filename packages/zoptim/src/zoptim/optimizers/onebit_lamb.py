"""1-bit LAMB (Li et al. 2021): LAMB in the warm-up, then compressed momenta and estimated trust ratios.

Trust ratios cannot be computed from compressed momenta, whose norms say little.  So the warm-up keeps a running mean
of each tensor's ratio, and afterwards a factor corrects it by how much second moments have changed: the gradients
that successive momenta imply continue a second, fresh estimate.

All momenta share one scale in a message, and are scaled to one size before they are sent.  Numbers of tensors
(`OneBitLambMoments`) are in the group's `tensors`, by name.  Tensors that are cut over ranks sum their squares in one
all-reduce a step.  The warm-up uses torch's operations, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from zoptim import _compat
from zoptim.backends.signals import Signals
from zoptim.checks import number
from zoptim.optimizers.base import Params
from zoptim.optimizers.onebit_adam import CompressedAdam, check_freeze_step, check_ignored
from zoptim.rules.onebit import rate_of
from zoptim.rules.onebit_lamb import OneBitLambPolicy, momentum_scales

__all__ = ["OneBitLamb"]

_FIRST = (0.0, 1.0, 0.0)  # coefficient, factor, scale of a tensor


@attrs.frozen(eq=False)
class _Part:
    """The part of one tensor in a shard."""

    name: str
    group: dict[str, Any]
    shard: Tensor
    row: slice  # of the flattened shard
    numel: int  # of the whole tensor

    @property
    def numbers(self) -> Sequence[float]:
        """Coefficient, factor and scale."""
        found: Sequence[float] = self.group["tensors"].get(self.name, _FIRST)
        return found


class OneBitLamb(CompressedAdam):
    """1-bit LAMB (Li et al. 2021): lr >= 0; betas in [0, 1); eps >= 0; weight_decay >= 0, part of the direction.

    `freeze_step` as in OneBitAdam.  `max_coeff` and `min_coeff` bound the trust ratio in the warm-up; `coeff_beta` is
    the weight of the past in its running mean; `factor_max`, `factor_min` and `factor_threshold` bound what corrects
    it afterwards, and how much that changes in one step.  Options without effect and group keys as OneBitAdam's.

    State of a parameter: `exp_avg`, `exp_avg_sq`, `exp_avg_sq_fresh`.

    Raises ValueError or TypeError naming the argument that is out of range, RuntimeError for amsgrad.
    """

    _moment_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq", "exp_avg_sq_fresh")
    fuses_message: ClassVar[bool] = True
    _absent_options: ClassVar[Mapping[str, Any]] = {**CompressedAdam._absent_options, "tensors": {}}

    def __init__(
        self,
        params: Params,
        lr: float | Tensor = 1e-3,
        freeze_step: int | str = 100_000,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        **ignored: Any,
    ) -> None:
        check_ignored("1-bit LAMB", ignored)
        self.freeze_step = check_freeze_step("freeze_step", freeze_step)
        low, smallest = number("min_coeff", min_coeff, 0), number("factor_min", factor_min, 0)
        self.policy = OneBitLambPolicy(
            max_coeff=number("max_coeff", max_coeff, low),
            min_coeff=low,
            coeff_beta=number("coeff_beta", coeff_beta, 0, 1),
            factor_max=number("factor_max", factor_max, smallest),
            factor_min=smallest,
            factor_threshold=number("factor_threshold", factor_threshold, 0),
        )
        super().__init__(params, lr, betas, eps, weight_decay, {"variance": 0.0})
        for group in self.param_groups:
            group["tensors"] = {}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see CompressedAdam."""
        super().add_param_group(param_group)
        self.param_groups[-1].setdefault("tensors", {})

    def _step(self, signals: Signals) -> None:
        shards = self._shards(exact=False)
        if not self.param_groups[0]["frozen"]:
            self._warm_up([*self._shards(exact=True), *shards], signals)
            if self._is_warm():
                self.begin_compression()
            return
        if exact := self._shards(exact=True):
            gradients = [gradient.clone() for gradient in self._local_gradients(exact, signals)]
            self._exchange.exact_mean(gradients)
            self._lamb(exact, [self._exchange.own(s, g) for s, g in zip(exact, gradients)])
        self._compressed(shards, signals)

    def begin_compression(self) -> None:
        """See CompressedAdam; the second estimate continues from the frozen one."""
        super().begin_compression()
        for shard in self._shards(exact=False):
            self._moment(shard, "exp_avg_sq_fresh").copy_(self._moment(shard, "exp_avg_sq"))

    # -- the warm-up -------------------------------------------------------------------------------

    def _warm_up(self, shards: Sequence[Tensor], signals: Signals) -> None:
        found = [torch.zeros_like(shard) if shard.grad is None else shard.grad.float() for shard in shards]
        self._lamb(shards, _compat.divide(found, signals.grad_scale))

    def _lamb(self, shards: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Update by LAMB.  gradients: means over ranks, of the shards' sizes."""
        updates = {}
        for shard, gradient in zip(shards, gradients):
            group = self._group(shard)
            beta1, beta2 = group["betas"]
            momentum, squares = self._moment(shard, "exp_avg"), self._moment(shard, "exp_avg_sq")
            gradient = gradient.view(momentum.shape)
            momentum.mul_(beta1).add_(gradient, alpha=1 - beta1)
            squares.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            updates[shard] = momentum / squares.sqrt().add_(group["eps"])
            if group["weight_decay"]:
                updates[shard].add_(shard, alpha=group["weight_decay"])
        parts = self._parts(shards)
        norms = self._norms(parts, [[part.shard for part in parts], [updates[part.shard] for part in parts]])
        for part, (weight_norm, update_norm) in zip(parts, norms):
            ratio = self.policy.ratio(weight_norm, update_norm)
            coefficient, factor, scale = part.numbers
            part.group["tensors"][part.name] = [self.policy.mean_coefficient(coefficient, ratio), factor, scale]
            updates[part.shard].view(-1)[part.row].mul_(ratio * rate_of(part.group["lr"]))
        for shard, update in updates.items():
            self._move(shard, update)

    # -- compressed --------------------------------------------------------------------------------

    def _compressed(self, shards: Sequence[Tensor], signals: Signals) -> None:
        parts = self._parts(shards)
        before = {shard: self._moment(shard, "exp_avg").clone() for shard in shards}
        if not all(part.numbers[2] for part in parts):
            (norms,) = zip(*self._norms(parts, [[before[part.shard] for part in parts]])) if parts else ((),)
            scales = momentum_scales([norm / max(part.numel, 1) ** 0.5 for part, norm in zip(parts, norms)])
            for part, scale in zip(parts, scales):
                part.group["tensors"][part.name] = [*part.numbers[:2], scale]
        wholes = self._local_momenta(shards, signals)
        self._scale(shards, wholes, inverse=False)
        self._exchange.mean(wholes)
        self._scale(shards, wholes, inverse=True)
        self._mask(shards, wholes)
        for shard, whole in zip(shards, wholes):
            self._moment(shard, "exp_avg").copy_(self._exchange.own(shard, whole).view(shard.shape))
        self._apply(parts, {shard: self._directions(shard, before[shard]) for shard in shards})

    def _local_momenta(self, shards: Sequence[Tensor], signals: Signals) -> list[Tensor]:
        """See CompressedAdam; the last result is that of scaled momenta."""
        wholes = self._exchange.latest(shards)
        if wholes is None:
            wholes = [whole.clone() for whole in self._exchange.wholes(shards, self._moments(shards, "exp_avg"))]
        else:
            self._scale(shards, wholes, inverse=True)
            self._mask(shards, wholes)
        for shard, whole, gradient in zip(shards, wholes, self._local_gradients(shards, signals)):
            beta1 = self._group(shard)["betas"][0]
            whole.mul_(beta1).add_(gradient.view(whole.shape), alpha=1 - beta1)
        return wholes

    def _scale(self, shards: Sequence[Tensor], wholes: Sequence[Tensor], *, inverse: bool) -> None:
        for shard, whole in zip(shards, wholes):
            group = self._group(shard)
            for place in self._exchange.places(shard):
                scale = group["tensors"].get(place.name, _FIRST)[2] or 1.0
                part = whole.view(-1)[place.start : place.start + math.prod(place.shape)]
                part.div_(scale) if inverse else part.mul_(scale)

    def _directions(self, shard: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return direction, update (with decay), and the ratio of second moments; continues the fresh ones."""
        group = self._group(shard)
        beta1, beta2 = group["betas"]
        momentum, fresh = self._moment(shard, "exp_avg"), self._moment(shard, "exp_avg_sq_fresh")
        implied = (momentum - beta1 * before) / (1 - beta1)
        fresh.mul_(beta2).addcmul_(implied, implied, value=1 - beta2)
        roots = self._moment(shard, "exp_avg_sq").sqrt().add_(group["eps"])
        direction = momentum / roots
        update = direction.add(shard, alpha=group["weight_decay"]) if group["weight_decay"] else direction
        return direction, update, roots / fresh.sqrt().add_(group["eps"])

    def _apply(self, parts: Sequence[_Part], found: Mapping[Tensor, tuple[Tensor, Tensor, Tensor]]) -> None:
        norms = self._norms(parts, [[found[part.shard][index] for part in parts] for index in (0, 1)])
        largest = torch.tensor([0.0] * len(parts), dtype=torch.float64)
        for index, part in enumerate(parts):
            ratios = found[part.shard][2].view(-1)[part.row]
            largest[index] = float(ratios.max()) if ratios.numel() else 0.0
        factors = self._exchange.largest(largest).tolist()
        for part, (direction, size), factor in zip(parts, norms, factors):
            coefficient, last, scale = part.numbers
            if part.group["weight_decay"]:
                share = min(1.0, direction / size) if size else 1.0
                factor = factor * share + 1.0 - share
            factor = self.policy.bounded(factor if part.numel else 1.0, last)
            part.group["tensors"][part.name] = [coefficient, factor, scale]
            found[part.shard][1].view(-1)[part.row].mul_(coefficient * factor * rate_of(part.group["lr"]))
        for shard, (_, update, _) in found.items():
            self._move(shard, update)

    # -- parts -------------------------------------------------------------------------------------

    def _parts(self, shards: Sequence[Tensor]) -> list[_Part]:
        """Return a part for each tensor in the wholes of shards, in the order of all ranks; empty where it is not."""
        parts = []
        for shard in shards:
            lo, hi = self._exchange.span(shard)
            for place in self._exchange.places(shard):
                numel = math.prod(place.shape)
                begin, end = max(lo, place.start), min(hi, place.start + numel)
                row = slice(begin - lo, max(begin, end) - lo) if begin < end else slice(0, 0)
                parts.append(_Part(place.name, self._group(shard), shard, row, numel))
        return parts

    def _norms(self, parts: Sequence[_Part], columns: Sequence[Sequence[Tensor]]) -> list[tuple[float, ...]]:
        """Return the norms of whole tensors: one for each column, by part."""
        if not parts:
            return []
        sums = [
            torch.stack([t.detach().view(-1)[p.row].double().square().sum() for p, t in zip(parts, tensors)])
            for tensors in columns
        ]
        squares = torch.stack(sums)
        return [tuple(row) for row in self._exchange.total(squares).sqrt().t().tolist()]
