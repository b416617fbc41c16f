"""The four keys of ZeRO++ as fields of a `ZeroPolicy`: in which form weights and gradients travel at stage 3.

The paper's widths: weights in 8 bits, gradients in 4.  Gradients are summed inside a node first, and then between
nodes; a node is what `zero_hpz_partition_size` says, else what the launcher says.
"""

from __future__ import annotations

from zengine.config.errors import NOWHERE, Problem
from zengine.config.load import Config
from zengine.config.parallel import ParallelPlan
from zengine.config.plan import Facts
from zengine.config.schema import Zero

__all__ = ["idle_keys", "secondary_fits", "wire_fields"]

WEIGHT_BITS, GRADIENT_BITS = 8, 4
SIZE = "zero_optimization.zero_hpz_partition_size"


def wire_fields(zero: Zero, facts: Facts, parallel: ParallelPlan) -> dict[str, int]:
    """The policy's fields; none below stage 3."""
    if zero.stage < 3:
        return {}
    here = facts.ranks_per_host // parallel.degrees.tensor  # tensor ranks are neighbours
    node = zero.zero_hpz_partition_size if zero.zero_hpz_partition_size > 1 else here
    fits = _copy_size(zero, parallel) % max(node, 1) == 0
    return {
        "weight_bits": WEIGHT_BITS * zero.zero_quantized_weights,
        "frozen_weight_bits": WEIGHT_BITS * zero.zero_quantized_nontrainable_weights,
        "secondary_group_size": zero.zero_hpz_partition_size * (zero.zero_hpz_partition_size > 1),
        "gradient_bits": GRADIENT_BITS * zero.zero_quantized_gradients,
        "gradient_hop_size": node * (zero.zero_quantized_gradients and fits),
    }


def secondary_fits(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Nodes are filled; alone, nothing is sharded and nobody looks."""
    zero = config.settings.zero_optimization
    size, total = zero.zero_hpz_partition_size, _copy_size(zero, parallel)
    if zero.stage < 3 or total == 1 or total % size == 0:
        return []
    allowed = ", ".join(str(number) for number in range(1, total + 1) if total % number == 0)
    return [
        Problem(
            place=config.given.get(SIZE, NOWHERE),
            key=SIZE,
            given=size,
            reason=f"it does not divide the {total} ranks that hold one copy of the weights",
            suggestion=f"Choose one of {allowed}: the ranks of a node, or 1 for no secondary shards.",
        )
    ]


def idle_keys(config: Config) -> list[str]:
    """Keys that ask for something which only stage 3 does."""
    zero = config.settings.zero_optimization
    asked = {
        "zero_hpz_partition_size": zero.zero_hpz_partition_size > 1,
        "zero_quantized_weights": zero.zero_quantized_weights,
        "zero_quantized_nontrainable_weights": zero.zero_quantized_nontrainable_weights,
        "zero_quantized_gradients": zero.zero_quantized_gradients,
    }
    return [f"zero_optimization.{key}" for key, is_asked in asked.items() if is_asked and zero.stage < 3]


def _copy_size(zero: Zero, parallel: ParallelPlan) -> int:
    """Ranks over which weights are cut."""
    return zero.shard_group_size or parallel.gradient_ranks
