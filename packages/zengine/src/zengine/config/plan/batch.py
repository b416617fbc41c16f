"""The batch equation: train = micro x accumulation x replicas.

One or two of the three may be absent, as long as train or micro is given.  Division must be exact: a quotient that is
rounded down silently changes the batch size.  Every message contains the equation with its numbers and the nearest
values that satisfy it.
"""

from __future__ import annotations

import math

import attrs

from zengine.data.order.uneven import UnevenStep

_SEARCHED = 10**12  # samples per replica; divisors of larger numbers are not searched


@attrs.frozen(kw_only=True)
class BatchTerms:
    """The three sizes as written; 0: not given.  Given sizes are at least 1."""

    train: int = 0
    micro: int = 0
    accumulation: int = 0


@attrs.frozen(kw_only=True)
class BatchPlan:
    """Batch sizes.  Invariant: train_batch_size == micro_batch_size * accumulation * replicas, unless `uneven`."""

    train_batch_size: int  # samples per optimizer step, over all replicas
    micro_batch_size: int  # samples per forward on one rank; the most, if it is uneven
    accumulation: int  # micro-steps per optimizer step
    replicas: int  # data-parallel copies of the model

    @property
    def uneven(self) -> tuple[UnevenStep, ...]:
        """The shares of replicas whose numbers of samples differ; () if they are equal."""
        if self.train_batch_size == self.micro_batch_size * self.accumulation * self.replicas:
            return ()
        step = UnevenStep(batch=self.train_batch_size, accumulation=self.accumulation, world_size=self.replicas)
        return (step,)

    def sizes_of(self, replica: int) -> tuple[int, ...]:
        """Return the samples of a replica's batch in each micro-step; at least one, which may have no weight."""
        for step in self.uneven:
            return tuple(max(1, len(step.share(index, replica))) for index in range(self.accumulation))
        return (self.micro_batch_size,) * self.accumulation


class Unsolvable(Exception):
    """The equation has no solution: the reason and a suggestion."""

    def __init__(self, reason: str, suggestion: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestion = suggestion


def solve(terms: BatchTerms, replicas: int) -> BatchPlan:
    """Solve the equation.  Raises Unsolvable if there is no solution."""
    train, micro, accumulation = terms.train, terms.micro, terms.accumulation
    if not train and not micro:
        raise Unsolvable(
            "neither train_batch_size nor train_micro_batch_size_per_gpu is given",
            'Add one of them, for example "train_micro_batch_size_per_gpu": 1.',
        )
    if not micro:
        micro = _quotient("micro", train, "accumulation", accumulation or 1, replicas)
    elif train and not accumulation:
        accumulation = _quotient("accumulation", train, "micro", micro, replicas)
    accumulation = accumulation or 1
    product = micro * accumulation * replicas
    if train and train != product:
        raise _does_not_hold(train, micro, accumulation, replicas)
    return BatchPlan(train_batch_size=product, micro_batch_size=micro, accumulation=accumulation, replicas=replicas)


def _quotient(wanted: str, train: int, name: str, factor: int, replicas: int) -> int:
    """Return train / (factor x replicas); raise Unsolvable if it is not a whole number."""
    divisor = factor * replicas
    if train % divisor == 0:
        return train // divisor
    nearest = " or ".join(str(size) for size in (train // divisor * divisor, -(-train // divisor) * divisor) if size)
    raise Unsolvable(
        f"train_batch_size {train} = {name} {factor} x replicas {replicas} x {wanted} does not hold "
        f"for any whole {wanted} ({train / divisor:.4g})",
        f"Nearest valid train_batch_size: {nearest}." + _other_factors(train, name, factor, replicas),
    )


def _does_not_hold(train: int, micro: int, accumulation: int, replicas: int) -> Unsolvable:
    product = micro * accumulation * replicas
    fixes = []
    if train % (micro * replicas) == 0:
        fixes.append(f"accumulation to {train // (micro * replicas)}")
    if train % (accumulation * replicas) == 0:
        fixes.append(f"micro to {train // (accumulation * replicas)}")
    fixes.append(f"train_batch_size to {product}")
    return Unsolvable(
        f"train_batch_size {train} = micro {micro} x accumulation {accumulation} x replicas {replicas} "
        f"does not hold ({product})",
        f"Set {', or '.join(fixes)}.",
    )


def _other_factors(train: int, name: str, factor: int, replicas: int) -> str:
    """Return a hint with the nearest values of the given factor that solve the equation; "" if there are none."""
    share = train // replicas
    if train % replicas or share > _SEARCHED:
        return ""
    divisors = {half for low in range(1, math.isqrt(share) + 1) if share % low == 0 for half in (low, share // low)}
    below = max(value for value in divisors if value < factor)  # 1 at least: factor is no divisor
    above = min((value for value in divisors if value > factor), default=0)
    return f" Or keep it with {name} {below}" + (f" or {above}." if above else ".")
