"""The batch equation: train = micro x accumulation x replicas.

Any one of the three may be left out, or two, as long as train or micro is there.  Division must be exact: a
quotient that is rounded down changes the batch size in silence.  Every message holds the equation with its
numbers and the nearest values that would close it.
"""

from __future__ import annotations

import math

import attrs

_SEARCHED = 10**12  # samples a replica; beyond that nobody needs a list of divisors


@attrs.frozen(kw_only=True)
class BatchTerms:
    """The three sizes as written; 0 = not given.  Sizes that are given are at least 1."""

    train: int = 0
    micro: int = 0
    accumulation: int = 0


@attrs.frozen(kw_only=True)
class BatchPlan:
    """Invariant: train_batch_size == micro_batch_size * accumulation * replicas."""

    train_batch_size: int  # samples per optimizer step, over all replicas
    micro_batch_size: int  # samples per forward on one rank
    accumulation: int  # micro-steps per optimizer step
    replicas: int  # data-parallel copies of the model


class Unsolvable(Exception):
    """The equation does not close: why, and what would."""

    def __init__(self, reason: str, suggestion: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.suggestion = suggestion


def solve(terms: BatchTerms, replicas: int) -> BatchPlan:
    """The one solution, or Unsolvable."""
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
    """train / (factor x replicas), which must be a whole number."""
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
    """The nearest values of the given factor with which this train size works; "" when none does."""
    share = train // replicas
    if train % replicas or share > _SEARCHED:
        return ""
    divisors = {half for low in range(1, math.isqrt(share) + 1) if share % low == 0 for half in (low, share // low)}
    below = max(value for value in divisors if value < factor)  # 1 at least: factor is no divisor
    above = min((value for value in divisors if value > factor), default=0)
    return f" Or keep it with {name} {below}" + (f" or {above}." if above else ".")
