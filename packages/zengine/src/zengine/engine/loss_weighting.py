"""What the losses of one step are divided by: the number of micro-steps, or the weight of everything in the step.

Problem.  A loss is the mean over a micro-batch.  If one micro-batch has 10 tokens that count and another 1000, the
mean of the two means is not the mean over 1010 tokens: accumulation and data parallelism then give other gradients
than one large batch does.

Design.  `backward(loss, weight=n)` says that the loss is a mean over n units (tokens, samples).  The gradient of
the step is sum(n g) / sum(n), over the micro-steps and ranks.  The total is known at the boundary only, so each
loss is multiplied by n / unit on its way, and the rest, total / (unit * replicas), joins the scalar by which loss
scale and clipping divide the gradients anyway: no pass of its own, and the total rides along in the one all-reduce
of the statistics.

[Note: the unit] is a power of two near the weight of all micro-steps of one rank in a step.  So n / unit is near
what 1 / accumulation would have been, gradients in fp16 or bf16 stay in the range that unweighted training has, and
another unit changes no bit of the result (but for numbers at the ends of the range).  All ranks need the same one:
they exchange the weights of the first micro-step of a run in which any is above 0, and keep the unit from then on; it
is saved with the counters.  A rank without a weight takes part as well: it cannot know that the others have some.
So there is one small message in the first backward of every run.  Whoever begins to weigh later, after steps without
weights, causes none: the unit of that step is 1, and its total, which every rank learns at the boundary, sets it.

Rejected.  Dividing by the total beforehand (the caller would have to see all batches of a step in advance, as other
trainers demand); a second all-reduce; multiplying by n as it is (fp16 gradients overflow at a few thousand tokens).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Protocol, final

import attrs
import torch
from torch import Tensor

from zengine.engine.clock import UNWEIGHTED, Clock, MicroStep

Weight = float | Tensor  # of one micro-batch on one rank: a count, or a () tensor on the device


class Kind(enum.Enum):
    """What the losses of the running step are divided by."""

    UNKNOWN = "unknown"  # no backward yet
    COUNTED = "counted"  # the number of micro-steps
    WEIGHTED = "weighted"  # the weight of all of them
    UNSEEN = "unseen"  # the caller ran the backward, nobody knows what it divided by


@final
@attrs.define(eq=False)
class StepLoss:
    """The losses of the running step, and what they weigh.

    Invariant: every backward of a step is of the same kind.
    """

    clock: Clock  # has the unit
    device: torch.device
    replicas: int  # ranks that take the mean of their gradients
    exchange: Callable[[float | None], list[float | None]]  # everybody's number, on all ranks
    has_met: bool = False  # whether the ranks have told each other what they weigh
    kind: Kind = Kind.UNKNOWN
    loss: Tensor | float = 0.0  # () float64: sum of the shares of this rank
    weight: Weight = 0.0  # sum of the weights of this rank

    def share(self, loss: Tensor, micro: MicroStep, weight: Weight | None, *, divides: bool) -> Tensor:
        """Return what `loss` contributes to the step: what is to be differentiated.

        loss: () or (1,), with a graph.  weight: the units it is a mean of; None: every micro-batch counts the same.
        divides: an unweighted loss is divided by the number of micro-steps.

        Raises:
            ValueError: the weight is negative or not finite; or some backwards of a step have one and others none,
                on this rank or (in the first one of a run) on others.
        """
        if micro.is_first:
            self.kind, self.loss, self.weight = Kind.UNKNOWN, 0.0, 0.0
        kind = Kind.COUNTED if weight is None else Kind.WEIGHTED
        if self.kind is Kind.UNSEEN and kind is Kind.COUNTED:
            kind = Kind.UNSEEN  # it stays so: what came before is missing from the mean
        if self.kind not in (Kind.UNKNOWN, kind):
            raise ValueError(
                f"backward() {self.clock.position} with{'out' * (weight is None)} a weight, after one "
                f"with{'out' * (weight is not None)} in the same step: give every backward of a step its weight, "
                "or none"
            )
        self.kind = kind
        checked = None if weight is None else _checked(weight)
        self.meet(checked, micro)
        if checked is None:
            return loss / micro.count if divides and micro.count != 1 else loss
        self.weight = self.weight + checked
        return _without_empty(loss * (checked / self._unit), checked)

    def meet(self, weight: Weight | None, micro: MicroStep) -> None:
        """In the first backward of a run hear how the others weigh, and choose the unit.  See [Note: the unit]."""
        if self.has_met:
            return
        is_known = self.clock.weight_exponent != UNWEIGHTED  # a run that goes on: it weighs or not as it did
        found = self.exchange(None if weight is None else float(weight))
        weights = [each for each in found if each is not None]
        if weights and len(weights) != len(found):
            raise ValueError(self._divided(len(weights), len(found)))
        mean = sum(weights) / len(found) * micro.count
        self.has_met = is_known or not weights or mean > 0  # where nothing weighs anything yet, the next may
        if mean > 0 and not is_known:
            self.clock.weight_exponent = round(math.log2(mean))

    def add(self, share: Tensor) -> None:
        """Remember what was differentiated; `share` has no graph any more."""
        on_host = self.device.type == "cpu"  # there a number costs less than a tensor; elsewhere nobody waits for one
        self.loss = self.loss + (share.item() if on_host else share.double().reshape(()))

    def take(self, loss: float) -> None:
        """The mean loss of all micro-steps of this rank, of a step that was carried out at once."""
        self.kind, self.loss, self.weight = Kind.COUNTED, loss, 0.0

    def forget(self) -> None:
        """The losses of this step are not known: backwards ran that the engine was not told of."""
        self.kind, self.loss, self.weight = Kind.UNSEEN, math.nan, 0.0

    def is_finite(self) -> bool:
        """Return whether the losses of this rank are numbers, or unknown.  Waits for the device."""
        return self.kind is Kind.UNSEEN or math.isfinite(self.loss)

    def statistics(self, num_unused: int, drift: float | Tensor) -> Tensor:
        """(5,) float64 on the device, to be summed over ranks: drift, unused parameters, mean loss, weight, who
        weighs.
        """
        is_weighted = self.kind is Kind.WEIGHTED
        values = (drift, num_unused, self.loss / self.replicas, self.weight, float(is_weighted))
        row = torch.tensor([0.0 if isinstance(each, Tensor) else each for each in values], dtype=torch.float64)
        row = row.to(self.device)
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                row[index] = value.reshape(())
        return row

    def remainder(self, weight: float, num_weighted: float) -> float:
        """By what the summed gradients still have to be divided, from two sums of `statistics` over all ranks.

        Raises:
            ValueError: some ranks gave weights in this step and others did not.
        """
        if num_weighted == 0:
            return 1.0
        if num_weighted != self.replicas:
            raise ValueError(self._divided(num_weighted, self.replicas))
        unit, mean = self._unit, weight / self.replicas
        if self.clock.weight_exponent == UNWEIGHTED and mean > 0:
            self.clock.weight_exponent = round(math.log2(mean))
        return mean / unit

    @property
    def _unit(self) -> float:
        """See [Note: the unit]; where nothing has weighed anything yet, any is as good."""
        exponent = self.clock.weight_exponent
        return 1.0 if exponent == UNWEIGHTED else 2.0**exponent

    def _divided(self, num_weighted: float, num_ranks: int) -> str:
        return (
            f"{num_weighted:g} of {num_ranks} ranks gave backward() a weight in step {self.clock.steps}, the others "
            "none: all ranks have to, 0 where a batch holds nothing that counts"
        )


def _without_empty(share: Tensor, weight: Weight) -> Tensor:
    """`share`, or 0 with its graph where the weight is 0: torch's mean over nothing is NaN."""
    if isinstance(weight, Tensor):
        return share.masked_fill(weight.to(share.device) == 0, 0.0)
    return share if weight else share.nan_to_num(0.0, 0.0, 0.0)


def _checked(weight: Weight) -> Weight:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"backward(weight=...) takes one number, got shape {tuple(weight.shape)}")
        return weight.detach().reshape(()).double()
    if not (math.isfinite(weight) and weight >= 0):
        raise ValueError(
            f"backward(weight={weight!r}): give the number of tokens (or samples) that the loss is a mean "
            "of, 0 or more"
        )
    return float(weight)


# What may be passed to `backward`.


def check_loss(loss: object) -> None:
    """Refuse what cannot be differentiated.

    Raises:
        TypeError: not a tensor.
        ValueError: not a scalar, or no graph behind it.
    """
    if not isinstance(loss, torch.Tensor):
        raise TypeError(f"backward() needs the loss tensor, got {type(loss).__name__}")
    if loss.numel() != 1:
        raise ValueError(
            f"backward() needs a scalar loss, got shape {tuple(loss.shape)}: reduce it first, loss.mean() for example"
        )
    if not loss.requires_grad:
        raise ValueError(
            "backward() got a loss without a graph: it was detached, or computed under torch.no_grad(), or every "
            "parameter behind it is frozen"
        )


class Reached(Protocol):
    """What a partition tells about the backward in progress."""

    @property
    def is_alone(self) -> bool: ...
    def num_arrived(self) -> int: ...


def check_reached(partition: Reached) -> None:
    """Refuse a loss that is not computed from the engine's parameters.

    With several ranks one of them may have nothing to learn from (a batch that is all padding); that no rank has is
    found at the boundary, where they agree on it.

    Raises:
        ValueError: backward produced no gradient, and there is no other rank.
    """
    if partition.is_alone and partition.num_arrived() == 0:
        raise ValueError(
            "backward() got a loss that reaches no parameter of this engine: it was computed by another module, or "
            "every parameter behind it is frozen or missing from the optimizer"
        )
