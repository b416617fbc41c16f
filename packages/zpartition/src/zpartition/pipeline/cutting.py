"""Which layers make up which stage.

Stages should take equally long, and the slowest decides.  So a cut of n layers with weights w into k runs is best if
its heaviest run is as light as can be: found by binary search over the bound with a greedy filling, exactly.

Methods: `uniform` (as many layers each), `parameters` (as many trainable elements each), `type:REGEX` (as many
layers of classes whose name matches each), `best` (parameters, if the model has enough for them to say anything).
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class CutError(ValueError):
    """Layers that cannot be cut as asked for."""


def cut(weights: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Bounds b with stage s = layers b[s] to b[s+1]-1, none empty, the heaviest stage as light as can be.

    Among cuts that are as good, later stages are not heavier than they need to be.
    Raises CutError if there are fewer layers than stages.
    """
    if not 1 <= num_stages <= len(weights):
        raise CutError(
            f"{len(weights)} layers cannot be cut into {num_stages} stages: each stage needs one layer. Use at "
            f"most {len(weights)} stages, or write the model as more layers"
        )
    low, high = max(weights), float(sum(weights))
    candidates = sorted({low, high, *_run_sums(weights)}) if len(weights) <= 200 else []
    if candidates:
        return _filled(weights, num_stages, _least(candidates, weights, num_stages))
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if _needs(weights, middle) <= num_stages else (middle, high)
    return _filled(weights, num_stages, high)


def layer_weights(method: str, numels: Sequence[int], classes: Sequence[str]) -> list[float]:
    """The weight of each layer under a method; `numels` are trainable elements, `classes` names of their classes.

    Raises CutError for an unknown method, or a pattern that matches no layer.
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
        raise CutError(
            f"partition_method {method!r} matches no layer; their classes are {', '.join(sorted(set(classes)))}"
        )
    raise CutError(f'partition_method {method!r}: write "uniform", "parameters", "type:REGEX" or "best"')


def _run_sums(weights: Sequence[float]) -> list[float]:
    return [float(sum(weights[i:j])) for i in range(len(weights)) for j in range(i + 1, len(weights) + 1)]


def _least(candidates: Sequence[float], weights: Sequence[float], num_stages: int) -> float:
    """The smallest bound that `num_stages` runs keep."""
    first, last = 0, len(candidates) - 1
    while first < last:
        middle = (first + last) // 2
        first, last = (first, middle) if _needs(weights, candidates[middle]) <= num_stages else (middle + 1, last)
    return candidates[first]


def _needs(weights: Sequence[float], bound: float) -> int:
    """How many runs a greedy filling takes."""
    runs, load = 1, 0.0
    for weight in weights:
        if weight > bound:
            return len(weights) + 1
        runs, load = (runs, load + weight) if load + weight <= bound else (runs + 1, weight)
    return runs


def _filled(weights: Sequence[float], num_stages: int, bound: float) -> tuple[int, ...]:
    """Bounds of runs that keep the bound; a run ends early where the rest needs the layers, one a stage."""
    bounds, load = [0], 0.0
    for number, weight in enumerate(weights):
        is_full = load + weight > bound
        must_end = len(weights) - number == num_stages - len(bounds)
        if number > bounds[-1] and len(bounds) < num_stages and (is_full or must_end):
            bounds.append(number)
            load = 0.0
        load += weight
    return (*bounds, len(weights))
