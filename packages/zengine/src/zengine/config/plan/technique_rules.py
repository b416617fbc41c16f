"""Rules of optional techniques that the degrees of parallelism decide."""

from __future__ import annotations

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.plan.parallel import ParallelPlan
from zengine.config.plan.techniques.compression import compression_notices
from zengine.config.reading.load import Config, at, violation

__all__ = ["KEYS_OF_MODE", "technique_notices", "technique_problems"]

# Keys of sparse_attention that a mode takes, beside mode and block.
KEYS_OF_MODE: dict[str, tuple[str, ...]] = {
    "dense": (),
    "fixed": (
        *("different_layout_per_head", "num_local_blocks", "num_global_blocks", "attention"),
        *("horizontal_global_attention", "num_different_global_patterns"),
    ),
    "variable": (
        *("different_layout_per_head", "num_random_blocks", "local_window_blocks", "global_block_indices"),
        *("global_block_end_indices", "attention", "horizontal_global_attention"),
    ),
    "bigbird": (
        *("different_layout_per_head", "num_random_blocks", "num_sliding_window_blocks", "num_global_blocks"),
        "attention",
    ),
    "bslongformer": (
        *("different_layout_per_head", "num_sliding_window_blocks", "global_block_indices"),
        *("global_block_end_indices", "attention"),
    ),
}

_SPLITS = {
    "pipeline": "each of {size} pipeline stages has a part of the graph of the loss, which no rank can differentiate "
    "twice",
    "tensor": "the sums between {size} tensor-parallel ranks have no second derivative",
    "sequence": "the exchanges between {size} ranks of a sequence have no second derivative",
    "expert": "{size} ranks hold different experts, so they share no block",
}


def technique_notices(config: Config) -> list[str]:
    """Return notices for keys of compression, and of sparse_attention, without effect beside others."""
    return [*compression_notices(config), *_sparse_attention_notices(config)]


def _sparse_attention_notices(config: Config) -> list[str]:
    """Return a notice for keys of sparse_attention that its mode does not take."""
    home, mode = "sparse_attention.", config.settings.sparse_attention.mode
    taken = {f"{home}{name}" for name in ("mode", "block", *KEYS_OF_MODE[mode])}
    unused = [key for key in config.given if key.startswith(home) and key not in taken]
    if not unused:
        return []
    verb = "has" if len(unused) == 1 else "have"
    return [f'{config.origin(unused[0])}: {", ".join(unused)} {verb} no effect here: the mode is "{mode}"']


def technique_problems(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Reject techniques that cannot work with these degrees."""
    return [*_check_eigenvalue(config, parallel), *_check_inference_tp(config, parallel)]


def _check_eigenvalue(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Reject eigenvalue where the graph of the loss is split between ranks, where ranks share no block, and twice."""
    settings, outer, inner = config.settings, "eigenvalue.enabled", "quantize_training.eigenvalue.enabled"
    is_inner = settings.quantize_training.enabled and settings.quantize_training.eigenvalue.enabled
    if not (settings.eigenvalue.enabled or is_inner):
        return []
    key = inner if is_inner else outer
    if settings.eigenvalue.enabled and is_inner:
        reason = f"{at(config, inner)} and {at(config, outer)} are both on"
        return [*filter(None, [violation(config, inner, reason, "Write the section once.")])]
    sizes = {axis: getattr(parallel.degrees, axis) for axis in _SPLITS}
    return [
        Problem(
            place=config.given.get(key, NOWHERE),
            key=key,
            given=True,
            reason=_SPLITS[axis].format(size=size),
            suggestion="Remove the section, or train the model without that split.",
        )
        for axis, size in sizes.items()
        if size > 1
    ]


def _check_inference_tp(config: Config, parallel: ParallelPlan) -> list[Problem]:
    """Reject a tensor split of rollouts that does not divide the ranks, or beside another split of the model."""
    section, key = config.settings.hybrid_engine, "hybrid_engine.inference_tp_size"
    size, ranks = section.inference_tp_size, parallel.data_ranks
    splits = [axis for axis in _SPLITS if getattr(parallel.degrees, axis) > 1]
    if not section.enabled or size == 1 or (not splits and ranks % size == 0):
        return []
    if splits:
        reason = f"the model is split over {getattr(parallel.degrees, splits[0])} {splits[0]} ranks already"
        suggestion = "Leave it at 1: rollouts then run over the splits of training."
    else:
        divisors = [str(each) for each in range(1, ranks + 1) if ranks % each == 0]
        reason = f"it does not divide the {ranks} ranks of this run"
        suggestion = f"Use one of {', '.join(divisors)}."
    return [Problem(place=config.given.get(key, NOWHERE), key=key, given=size, reason=reason, suggestion=suggestion)]
