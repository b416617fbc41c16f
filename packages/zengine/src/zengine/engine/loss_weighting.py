"""Loss weighting: each loss is divided by the number of micro-steps or, if weights are given, by their total.

Problem.  A loss is the mean over a micro-batch.  If one micro-batch has 10 tokens that count and another 1000, the
mean of the two means is not the mean over 1010 tokens: accumulation and data parallelism then give other gradients
than one large batch.

Design.  `backward(loss, weight=n)` declares the loss a mean over n units (tokens, samples).  The gradient of the step
is sum(n g) / sum(n) over micro-steps and ranks.  The total is known only at the boundary, so each loss is multiplied
by n / unit, and the remainder, total / (unit * replicas), joins the scalar by which loss scale and clipping divide
the gradients: no pass of its own, and the total is part of the one all-reduce of the statistics.

[Note: the unit] is a power of two near the weight of all micro-steps of one rank in a step.  So n / unit is near
1 / accumulation, gradients in fp16 or bf16 stay in the range of unweighted training, and another unit changes no bit
of the result (except near the limits of the range).  All ranks need the same unit: they exchange the weights of the
first micro-step of a run in which any is above 0, and keep the unit from then on; it is saved with the counters.
Ranks without a weight take part, since they cannot know that others have one.  So the first backward of every run
sends one small message.  If weights begin after steps without any, there is no message: the unit of that step is 1,
and its total, which every rank learns at the boundary, sets the unit.

Rejected.  Dividing by the total in advance (the caller would need all batches of a step, as other trainers demand); a
second all-reduce; multiplying by n itself (fp16 gradients overflow at a few thousand tokens).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zengine.engine.clock import UNWEIGHTED, Clock, MicroStep

Weight = float | Tensor  # of one micro-batch on one rank: a count, or a () tensor on the device


class Kind(enum.Enum):
    """Divisor of the losses of the running step."""

    UNKNOWN = "unknown"  # no backward yet
    COUNTED = "counted"  # the number of micro-steps
    WEIGHTED = "weighted"  # the weight of all of them
    UNSEEN = "unseen"  # the caller ran the backward: the divisor is unknown


@final
@attrs.define(eq=False)
class StepLoss:
    """Losses and weights of the running step.

    Invariant: every backward of a step is of the same kind.
    """

    clock: Clock  # holds the unit
    device: torch.device
    replicas: int  # ranks that average their gradients
    exchange: Callable[[float | None], list[float | None]]  # all-gathers a number of each rank
    factors: Sequence[float] = ()  # of each micro-step's mean, if a step is uneven (data/order/uneven.py)
    has_agreed: bool = False  # the ranks have exchanged their first weights
    kind: Kind = Kind.UNKNOWN
    loss: Tensor | float = 0.0  # () float64: sum of the shares of this rank
    weight: Weight = 0.0  # sum of the weights of this rank

    def share(self, loss: Tensor, micro: MicroStep, weight: Weight | None, *, divides: bool) -> Tensor:
        """Return the contribution of `loss` to the step, which is differentiated.

        loss: () or (1,), with a graph.  weight: number of units of its mean; None: micro-batches count equally.
        divides: divide an unweighted loss by the number of micro-steps; in an uneven step, the mean over the batch is
            not multiplied by it.

        Raises:
            ValueError: the weight is negative or not finite; or only some backwards of a step have a weight, on this
                rank or (in the first backward of a run) on others.
        """
        if micro.is_first:
            self.kind, self.loss, self.weight = Kind.UNKNOWN, 0.0, 0.0
        kind = Kind.COUNTED if weight is None else Kind.WEIGHTED
        if self.kind is Kind.UNSEEN and kind is Kind.COUNTED:
            kind = Kind.UNSEEN  # stays: earlier losses are missing from the mean
        if self.kind not in (Kind.UNKNOWN, kind):
            raise ValueError(
                f"backward() {self.clock.position} with{'out' * (weight is None)} a weight, after one "
                f"with{'out' * (weight is not None)} in the same step: give every backward of a step its weight, "
                "or none"
            )
        self.kind = kind
        checked = None if weight is None else _check_weight(weight)
        factor = self.factors[micro.index] if self.factors else 1.0 / micro.count
        if checked is not None and not factor:
            checked = 0.0 * checked  # the batch stands in for an empty share
        self.agree_on_unit(checked, micro)
        if checked is None and self.factors:
            return _without_empty(loss * (factor if divides else factor * micro.count), factor)
        if checked is None:
            return loss / micro.count if divides and micro.count != 1 else loss
        self.weight = self.weight + checked
        return _without_empty(loss * (checked / self._unit), checked)

    def agree_on_unit(self, weight: Weight | None, micro: MicroStep) -> None:
        """Choose the unit in the first backward of a run; a collective then.  See [Note: the unit]."""
        if self.has_agreed:
            return
        is_known = self.clock.weight_exponent != UNWEIGHTED  # a resumed run keeps its unit
        found = self.exchange(None if weight is None else float(weight))
        weights = [each for each in found if each is not None]
        if weights and len(weights) != len(found):
            raise ValueError(self._mixed_message(len(weights), len(found)))
        mean = sum(weights) / len(found) * micro.count
        self.has_agreed = is_known or not weights or mean > 0  # while all weights are 0, later ones may not be
        if mean > 0 and not is_known:
            self.clock.weight_exponent = round(math.log2(mean))

    def add(self, share: Tensor) -> None:
        """Add a differentiated share, which is detached."""
        on_host = self.device.type == "cpu"  # a number is cheaper there; on a device it would synchronize
        self.loss = self.loss + (share.item() if on_host else share.double().reshape(()))

    def set_mean(self, loss: float) -> None:
        """Set the mean loss of this rank, for a step that ran as one batch."""
        self.kind, self.loss, self.weight = Kind.COUNTED, loss, 0.0

    def mark_unknown(self, micro: MicroStep) -> None:
        """Mark the losses of this step as unknown: backwards ran without the engine.

        Raises:
            ValueError: earlier losses of the step had weights.
        """
        if self.kind is Kind.WEIGHTED and not micro.is_first:
            raise ValueError(
                f"step() {self.clock.position} found gradients of a plain loss.backward(), after an engine.backward "
                "with a weight in the same step: give every backward of a step its weight, or none"
            )
        self.kind, self.loss, self.weight = Kind.UNSEEN, math.nan, 0.0

    def is_finite(self) -> bool:
        """Return True if the losses of this rank are finite, or unknown.  Waits for the device."""
        return self.kind is Kind.UNSEEN or math.isfinite(self.loss)

    def statistics(self, drift: float | Tensor, num_late: int, num_unused: int) -> Tensor | Sequence[float]:
        """Return numbers to sum over ranks: drift, late buckets, unused parameters, mean loss, weight, 1 if weighted.

        (6,) float64 on the device; on CPUs numbers, if all are.
        """
        is_weighted = self.kind is Kind.WEIGHTED
        values = (drift, num_late, num_unused, self.loss / self.replicas, self.weight, float(is_weighted))
        if self.device.type == "cpu" and not any(isinstance(each, Tensor) for each in values):
            return values  # type: ignore[return-value]  # no tensor is among them
        numbers = [0.0 if isinstance(each, Tensor) else each for each in values]
        # A copy from pageable memory would wait for everything that the device has to do.
        row = torch.tensor(numbers, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        row = row.to(self.device, non_blocking=True)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                row[index] = value.reshape(())
        return row

    def remainder(self, weight: float, num_weighted: float) -> float:
        """Return the remaining divisor of the summed gradients, from two sums of `statistics` over all ranks.

        Raises:
            ValueError: only some ranks gave weights in this step.
        """
        if num_weighted == 0:
            return 1.0
        if num_weighted != self.replicas:
            raise ValueError(self._mixed_message(num_weighted, self.replicas))
        unit, mean = self._unit, weight / self.replicas
        if self.clock.weight_exponent == UNWEIGHTED and mean > 0:
            self.clock.weight_exponent = round(math.log2(mean))
        return mean / unit

    @property
    def _unit(self) -> float:
        """Return the unit, see [Note: the unit]; 1 before the first weight."""
        exponent = self.clock.weight_exponent
        return 1.0 if exponent == UNWEIGHTED else 2.0**exponent

    def _mixed_message(self, num_weighted: float, num_ranks: int) -> str:
        return (
            f"{num_weighted:g} of {num_ranks} ranks gave backward() a weight in step {self.clock.steps}, the others "
            "none: pass a weight on every rank, 0 for a batch without units"
        )


def _without_empty(share: Tensor, weight: Weight) -> Tensor:
    """Return `share`, or 0 with its graph if the weight is 0: torch's mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return share.masked_fill(weight.to(share.device) == 0, 0.0)
    return share if weight else share.nan_to_num(0.0, 0.0, 0.0)


def _check_weight(weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"backward(weight=...) takes one number, got shape {tuple(weight.shape)}")
        return weight.detach().reshape(()).double()
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(
            f"backward(weight={weight!r}): pass the number of tokens (or samples) in the mean of the loss, 0 or more"
        )
    return float(weight)


def check_loss(loss: object) -> None:
    """Check that `loss` can be differentiated.

    Raises:
        TypeError: not a tensor.
        ValueError: not a scalar, or without a graph.
    """
    if not isinstance(loss, torch.Tensor):
        advice = (
            "the loss itself, not loss.item()"
            if isinstance(loss, float)
            else "output.loss or outputs[0], for example"
        )
        raise TypeError(f"backward() needs the loss tensor, got {type(loss).__name__}: pass {advice}")
    if loss.numel() != 1:
        raise ValueError(
            f"backward() needs a scalar loss, got shape {tuple(loss.shape)}: reduce it first, loss.mean() for example"
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward() got a loss without a graph: it was detached, or computed under torch.no_grad(), or every "
            "parameter behind it is frozen. Pass the loss of engine(...) as it is, and unfreeze what is to train "
            "(requires_grad_(True))"
        )


class Reached(Protocol):
    """Facts of a partition about the running backward."""

    @property
    def is_alone(self) -> bool: ...
    def num_arrived(self) -> int: ...


def check_reached(partition: Reached) -> None:
    """Check that the backward produced gradients.

    Among several ranks one may have none (a batch of padding); if no rank has any, the boundary finds it.

    Raises:
        ValueError: there is one rank, and no gradient.
    """
    if partition.is_alone and partition.num_arrived() == 0:
        raise ValueError(
            "backward() got a loss that reaches no parameter of this engine: it was computed by another module, or "
            "every parameter behind it is frozen or missing from the optimizer. Compute it from the output of "
            "engine(...), and give the parameters to the optimizer"
        )
