"""Partition of layers into stages.

The slowest stage determines the speed, so stages should take equally long.  The best partition of n layers with
weights w into k runs minimizes the weight of the heaviest run.  It is found exactly, by binary search over that
weight with a greedy filling.

Methods: `uniform` (equal numbers of layers), `parameters` (equal numbers of trainable elements), `type:REGEX` (equal
numbers of layers whose class name matches), `best` (parameters, if the model has any).
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class LayerPartitionError(ValueError):
    """The layers cannot be partitioned as requested."""


def partition_balanced(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Return bounds b with stage s = layers b[s] to b[s+1]-1, none empty, that minimize the heaviest stage.

    Among equally good partitions, later stages are not heavier than necessary.
    Raises LayerPartitionError if there are fewer layers than stages.
    """
    if not 1 <= num_stages <= len(weights):
        raise LayerPartitionError(
            f"{len(weights)} layers cannot be partitioned into {num_stages} stages: each stage needs a layer. Use at "
            f"most {len(weights)} stages, or write the model as more layers"
        )
    low, high = max(weights), float(sum(weights))
    candidates = sorted({low, high, *_run_sums(weights)}) if len(weights) <= 200 else []
    if candidates:
        return _fill(weights, num_stages, _smallest_bound(candidates, weights, num_stages))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _num_runs(weights, middle) <= num_stages else (middle, high)
    return _fill(weights, num_stages, high)


def layer_weights(method: str, numels: Sequence[int], classes: Sequence[str]) -> list[float]:
    """Weigh each layer by a method; `numels` are trainable elements, `classes` the names of the layers' classes.

    Raises LayerPartitionError for an unknown method, or a pattern that matches no layer.
    """
    kind, _, pattern = method.lower().partition(":")
    if kind == "uniform":
        return [1.0] * len(numels)
    if kind == "parameters" or (kind == "best" and any(numels)):
        return [float(numel) for numel in numels]
    if kind == "best":
        return [1.0] * len(numels)
    if kind == "type" and pattern:
        found = [float(bool(re.search(pattern, name, re.IGNORECASE))) for name in classes]
        if any(found):
            return found
        raise LayerPartitionError(
            f"partition_method {method!r} matches no layer; their classes are {', '.join(sorted(set(classes)))}"
        )
    raise LayerPartitionError(f'partition_method {method!r}: write "uniform", "parameters", "type:REGEX" or "best"')


def _run_sums(weights: Sequence[float]) -> list[float]:
    return [float(sum(weights[i:j])) for i in range(len(weights)) for j in range(i + 1, len(weights) + 1)]


def _smallest_bound(candidates: Sequence[float], weights: Sequence[float], num_stages: int) -> float:
    """Return the smallest bound that `num_stages` runs can keep."""
    first, last = 0, len(candidates) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if _num_runs(weights, candidates[middle]) <= num_stages else (middle + 1, last)
    return candidates[first]


def _num_runs(weights: Sequence[float], bound: float) -> int:
    """Return the number of runs of a greedy filling."""
    runs, load = 1, 0.0
    for weight in weights:
        if weight > bound:
            return len(weights) + 1
        runs, load = (runs, load + weight) if load + weight <= bound else (runs + 1, weight)
    return runs


def _fill(weights: Sequence[float], num_stages: int, bound: float) -> tuple[int, ...]:
    """Return the bounds of runs within the bound; a run ends early if the remaining stages need the layers."""
    bounds, load = [0], 0.0
    for number, weight in enumerate(weights):
        is_full = load + weight > bound
        must_end = len(weights) - number == num_stages - len(bounds)
        if number > bounds[-1] and len(bounds) < num_stages and (is_full or must_end):
            bounds.append(number)
            load = 0.0
        load += weight
    return (*bounds, len(weights))
