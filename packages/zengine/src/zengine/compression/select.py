"""Selection of modules: names that the regular expressions of a group find, for each technique of a config.

Only kinds of layers that a technique can change are found, so `"*"` means all of those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
from torch import nn

from zengine.compression.techniques import (
    ChannelMask,
    HeadMask,
    RoundInput,
    RoundToFormat,
    RoundWeight,
    RowMask,
    SparseMask,
    Technique,
)
from zengine.config.grammar.errors import ConfigError
from zengine.config.keys.compression import (
    ActivationQuantization,
    ChannelPruning,
    CompressionTraining,
    HeadPruning,
    RowPruning,
    SparsePruning,
    WeightQuantization,
)
from zengine.config.plan.techniques.compression import (
    compression_violations,
    enabled_techniques,
    forward_techniques,
    kept_of,
)
from zengine.config.reading.load import load

__all__ = ["Match", "Selection", "is_compressible", "read_section", "select", "unwrapped"]

_LINEAR, _CONVOLUTION, _EMBEDDING = (nn.Linear,), (nn.Conv2d,), (nn.Embedding,)
_KINDS: Mapping[str, tuple[type[nn.Module], ...]] = {
    "weight_quantization": (*_LINEAR, *_CONVOLUTION, *_EMBEDDING),
    "activation_quantization": (*_LINEAR, *_CONVOLUTION),
    "sparse_pruning": (*_LINEAR, *_CONVOLUTION),
    "row_pruning": _LINEAR,
    "head_pruning": _LINEAR,
    "channel_pruning": _CONVOLUTION,
}  # and the parallel linear layers of an mpu, except for channels
_READERS = (nn.TransformerEncoderLayer, nn.MultiheadAttention)  # use the weights of their children as tensors


@attrs.frozen(kw_only=True)
class Match:
    """Modules that one regular expression of a group finds."""

    pattern: str
    names: tuple[str, ...]
    related: tuple[tuple[str, ...], ...]  # for each related expression as many names as `names`


@attrs.frozen(kw_only=True)
class Selection:
    """One group of one technique in a model."""

    technique: str
    group: str
    matches: tuple[Match, ...]
    make: Callable[[nn.Module], Technique]  # the technique for a layer

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all modules."""
        return tuple(name for match in self.matches for name in match.names)


def read_section(config: Any) -> CompressionTraining:
    """Return the section of a config: a path, a dict or JSON text.  Raises ConfigError."""
    loaded = load(config)
    problems = compression_violations(loaded)
    if problems:
        raise ConfigError(loaded.source, problems)
    return loaded.settings.compression_training


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the module inside an engine or a wrapper such as DistributedDataParallel."""
    inner = getattr(model, "module", None)
    return inner if isinstance(inner, nn.Module) else model


def is_compressible(module: nn.Module, technique: str, mpu: Any = None) -> bool:
    """Return True if the technique can change a module of this kind."""
    parallel = (getattr(mpu, name, None) for name in ("ColumnParallelLinear", "RowParallelLinear"))
    own = tuple(kind for kind in parallel if isinstance(kind, type)) if technique != "channel_pruning" else ()
    return isinstance(module, (*_KINDS[technique], *own))


def select(model: nn.Module, section: CompressionTraining, mpu: Any = None) -> list[Selection]:
    """Return every group of every technique that acts in forward, in the order in which they act.

    Raises ValueError for a module in two groups of one technique, and for related modules that do not match one to
    one.
    """
    read = {id(child) for each in model.modules() if isinstance(each, _READERS) for child in each.modules()}
    modules = {name: module for name, module in model.named_modules() if name and id(module) not in read}
    found = []
    for name, technique in enabled_techniques(section).items():
        candidates = [path for path, module in modules.items() if is_compressible(module, name, mpu)]
        owners: dict[str, str] = {}
        is_in_forward = name in forward_techniques(section)  # else the engine rounds after each update
        for group, members in technique.different_groups.items():
            matches = _matches(f"{name}.{group}", members, candidates, list(modules), owners)
            make = _maker(technique, members.params)
            if is_in_forward:
                found.append(Selection(technique=name, group=group, matches=matches, make=make))
    return found


def _matches(
    label: str, group: Any, candidates: Sequence[str], every: Sequence[str], owners: dict[str, str]
) -> tuple[Match, ...]:
    found = []
    for at, pattern in enumerate(group.modules):
        names = [name for name in candidates if _search(pattern, name) and owners.get(name) != label]
        if twice := [name for name in names if name in owners]:
            raise ValueError(
                f"compression_training: {twice[0]!r} matches {pattern!r} of {label}, and belongs to "
                f"{owners[twice[0]]}; a module is in one group of a technique. Make the expressions narrower"
            )
        owners.update(dict.fromkeys(names, label))
        related = group.related_modules[at] if group.related_modules else ()
        beside = tuple(_related(label, pattern, names, each, every) for each in related)
        found.append(Match(pattern=pattern, names=tuple(names), related=beside))
    return tuple(found)


def _related(label: str, pattern: str, names: Sequence[str], related: str, every: Sequence[str]) -> tuple[str, ...]:
    found = tuple(name for name in every if _search(related, name))
    if len(found) != len(names):
        raise ValueError(
            f"compression_training: {pattern!r} of {label} finds {len(names)} modules ({', '.join(names[:4])}), and "
            f"its related module {related!r} finds {len(found)} ({', '.join(found[:4])}); each needs one. Change the "
            "expressions"
        )
    return found


def _search(pattern: str, name: str) -> bool:
    return pattern == "*" or re.search(pattern, name) is not None


# -- from settings to techniques -----------------------------------------------------------------


def _maker(technique: Any, params: Any) -> Callable[[nn.Module], Technique]:
    return lambda layer: _make(technique, params, layer)


def _make(technique: Any, params: Any, layer: nn.Module) -> Technique:
    shared = technique.shared_parameters
    offset = shared.schedule_offset
    if isinstance(technique, WeightQuantization):
        if params.format:
            return RoundToFormat(offset=offset, format=params.format)
        groups = 0 if isinstance(layer, nn.Embedding) else shared.quantize_groups
        return RoundWeight(offset=offset, bits=params.target_bits, kind=shared.quantization_type, groups=groups)
    if isinstance(technique, ActivationQuantization):
        is_static = shared.range_calibration == "static"
        return RoundInput(offset=offset, bits=params.bits, kind=shared.quantization_type, is_static=is_static)
    masked = {"offset": offset, "ratio": params.dense_ratio, "is_learned": shared.method == "topk"}
    if isinstance(technique, SparsePruning):
        return SparseMask(**masked, neighbours=kept_of(shared.block_pattern), follows=shared.follow_weights)
    if isinstance(technique, RowPruning):
        return RowMask(**masked)
    if isinstance(technique, HeadPruning):
        return HeadMask(**masked, heads=shared.num_heads)
    assert isinstance(technique, ChannelPruning)
    return ChannelMask(**masked)
