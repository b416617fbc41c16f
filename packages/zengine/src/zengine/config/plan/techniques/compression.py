"""Rules of compression_training: keys that an enabled technique requires, and combinations that do not work."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

from zengine.config.grammar.errors import NOWHERE, Problem
from zengine.config.keys.compression import (
    ActivationQuantization,
    ChannelPruning,
    CompressionTraining,
    GroupScope,
    HeadPruning,
    RowPruning,
    SparsePruning,
    WeightBits,
    WeightQuantization,
)
from zengine.config.reading.load import Config

if TYPE_CHECKING:
    from zengine.config.plan.rows import PlanRow

__all__ = [
    "TECHNIQUES",
    "Technique",
    "compression_notices",
    "compression_violations",
    "enabled_techniques",
    "forward_techniques",
    "group_rows",
    "kept_of",
]

SECTION = "compression_training"
_WEIGHTS = f"{SECTION}.weight_quantization"
TECHNIQUES = (  # in the order in which they act on a weight, and are cleaned; the last one acts on inputs
    "weight_quantization",
    "sparse_pruning",
    "row_pruning",
    "head_pruning",
    "channel_pruning",
    "activation_quantization",
)
_RELATED = ("row_pruning", "head_pruning", "channel_pruning")

Technique: TypeAlias = (
    WeightQuantization | ActivationQuantization | SparsePruning | RowPruning | HeadPruning | ChannelPruning
)
_Found: TypeAlias = Iterator[tuple[str, str, str]]  # key below the section, reason, suggestion


def enabled_techniques(section: CompressionTraining) -> dict[str, Technique]:
    """Return the techniques that are switched on, by name, in the order in which they act."""
    found: dict[str, Technique] = {name: getattr(section, name) for name in TECHNIQUES}
    return {name: technique for name, technique in found.items() if technique.shared_parameters.enabled}


def forward_techniques(section: CompressionTraining) -> dict[str, Technique]:
    """Return the techniques that act in forward: all that are switched on, but rounding after updates (MoQ)."""
    found = enabled_techniques(section)
    if not section.weight_quantization.shared_parameters.quantize_weight_in_forward:
        found.pop("weight_quantization", None)
    return found


def kept_of(pattern: str) -> tuple[int, int] | None:
    """Return (N, M) of the block pattern "N:M"; None for others, such as "4x1"."""
    found = re.fullmatch(r"(\d+):(\d+)", pattern)
    return None if found is None else (int(found[1]), int(found[2]))


def group_rows(section: CompressionTraining, origins: Container[str]) -> Iterator[PlanRow]:
    """Yield the keys of groups that the config gives, with their values."""
    from zengine.config.plan.rows import rows  # late: imports torch

    for name in TECHNIQUES:
        for group, members in getattr(section, name).different_groups.items():
            path = f"{SECTION}.{name}.different_groups.{group}."
            found = [*rows(f"{path}params.", members.params, type(members.params)), *rows(path, members, GroupScope)]
            yield from (row for row in found if row[0] in origins)


def compression_notices(config: Config) -> list[str]:
    """Return a notice for keys of rounding after updates where weights are rounded in forward."""
    shared, home = config.settings.compression_training.weight_quantization.shared_parameters, _WEIGHTS
    unused = [
        key
        for key in config.given
        if (
            key.startswith((f"{home}.shared_parameters.fp16_mixed_quantize.", f"{home}.different_groups."))
            and key.endswith((".enabled", ".quantize_change_ratio", ".quantization_period"))
        )
        or (key == f"{home}.shared_parameters.rounding" and shared.rounding != "nearest")
        or (key == f"{home}.shared_parameters.quantize_verbose" and shared.quantize_verbose)
    ]
    if not (shared.enabled and shared.quantize_weight_in_forward and unused):
        return []
    verb = "has" if len(unused) == 1 else "have"
    return [
        f"{config.origin(unused[0])}: {', '.join(unused)} {verb} no effect here: weights are rounded in forward "
        "(quantize_weight_in_forward), to the nearest value of target_bits"
    ]


def compression_violations(config: Config) -> list[Problem]:
    """Return a problem for each rule of the section that `config` breaks."""
    section = config.settings.compression_training
    problems = []
    weights = section.weight_quantization.shared_parameters
    if weights.enabled and not weights.quantize_weight_in_forward and config.settings.quantize_training.enabled:
        key = f"{SECTION}.weight_quantization.shared_parameters.enabled"
        reason = "quantize_training.enabled rounds weights after each update as well"
        place = config.given.get(key, NOWHERE)
        problems.append(Problem(place=place, key=key, reason=reason, suggestion="Switch one of the two off."))
    for key, reason, suggestion in _problems(section):
        path = f"{SECTION}.{key}"
        place = config.given.get(path, NOWHERE)
        problems.append(Problem(place=place, key=path, reason=reason, suggestion=suggestion))
    return problems


def _problems(section: CompressionTraining) -> _Found:
    techniques = enabled_techniques(section)
    for name, technique in techniques.items():
        if not technique.different_groups:
            yield (
                f"{name}.different_groups",
                "the technique is enabled and has no group, so it would compress nothing",
                'Add a group, such as "all": {"params": {...}, "modules": ["*"]}, or set "enabled" to false.',
            )
        for group, members in technique.different_groups.items():
            yield from _scope(f"{name}.different_groups.{group}", members, is_related=name in _RELATED)
    yield from _weights(section.weight_quantization, "weight_quantization" in techniques)
    yield from _activations(section.activation_quantization, "activation_quantization" in techniques)
    for name in ("sparse_pruning", *_RELATED):
        if name in techniques:
            yield from _ratios(name, techniques[name], is_needed=not _is_pattern(techniques[name]))
    yield from _sparse(section.sparse_pruning, "sparse_pruning" in techniques)
    yield from _heads(section.head_pruning, "head_pruning" in techniques)
    yield from _reduction(section)


def _scope(path: str, group: Any, *, is_related: bool) -> _Found:
    for pattern in (*group.modules, *(each for related in group.related_modules for each in related)):
        try:
            re.compile("" if pattern == "*" else pattern)
        except re.error as error:
            yield f"{path}.modules", f"{pattern!r} is no regular expression: {error}", 'Write "*" for all modules.'
    if is_related and group.related_modules and len(group.related_modules) != len(group.modules):
        yield (
            f"{path}.related_modules",
            f"there are {len(group.related_modules)} lists of related modules, and {len(group.modules)} modules",
            "Write one list for each entry of modules.",
        )


def _weights(technique: WeightQuantization, is_on: bool) -> _Found:
    shared = technique.shared_parameters
    for group, members in technique.different_groups.items() if is_on else ():
        path, bits = f"weight_quantization.different_groups.{group}.params", members.params
        if bits.format:
            yield from _format(path, bits, shared.quantize_weight_in_forward)
            continue
        if missing := [key for key in ("start_bits", "target_bits") if not getattr(bits, key)]:
            yield (
                f"{path}.{missing[0]}",
                f"{' and '.join(missing)} must be given",
                'Add "start_bits" and "target_bits", such as 8 and 4; or "format": "int4-row".',
            )
        elif bits.target_bits <= 2 and shared.quantization_type != "symmetric":
            yield (
                f"{path}.target_bits",
                f"{bits.target_bits} bits are symmetric, and quantization_type is {shared.quantization_type!r}",
                'Set "quantization_type" to "symmetric", or use at least 3 bits.',
            )
        elif bits.start_bits < bits.target_bits:
            yield (
                f"{path}.start_bits",
                f"start_bits = {bits.start_bits} is below target_bits = {bits.target_bits}",
                "Begin with at least the bits of the end.",
            )


def _format(path: str, bits: WeightBits, is_in_forward: bool) -> _Found:
    from zprecision import format_named  # late: imports torch, which `zengine check` does without

    try:
        format_named(bits.format)
    except ValueError as error:
        yield f"{path}.format", str(error), 'Write for example "int4-row".'
    if not is_in_forward:
        yield (
            f"{path}.format",
            "a format is simulated in forward, and quantize_weight_in_forward is false",
            'Set "quantize_weight_in_forward" to true.',
        )
    if bits.target_bits or bits.start_bits:
        yield (
            f"{path}.format",
            f"format = {bits.format!r} and bits are given; the format has its own bits",
            "Keep one of the two.",
        )


def _activations(technique: ActivationQuantization, is_on: bool) -> _Found:
    for group, members in technique.different_groups.items() if is_on else ():
        if members.params.bits not in (4, 8):
            yield (
                f"activation_quantization.different_groups.{group}.params.bits",
                f"bits = {members.params.bits}: activations are rounded to 4 or 8 bits",
                "Write 4 or 8.",
            )


def _is_pattern(technique: Technique) -> bool:
    return isinstance(technique, SparsePruning) and kept_of(technique.shared_parameters.block_pattern) is not None


def _ratios(name: str, technique: Any, *, is_needed: bool) -> _Found:
    for group, members in technique.different_groups.items():
        if is_needed and not members.params.dense_ratio:
            yield (
                f"{name}.different_groups.{group}.params.dense_ratio",
                "dense_ratio, the share that is kept, must be above 0",
                'Add for example "dense_ratio": 0.5.',
            )


def _sparse(technique: SparsePruning, is_on: bool) -> _Found:
    shared = technique.shared_parameters
    if not is_on:
        return
    if shared.follow_weights and shared.method == "topk":
        yield (
            "sparse_pruning.shared_parameters.follow_weights",
            "topk chooses by scores that it learns, not by the weights",
            'Set "method" to "l1", or leave follow_weights out.',
        )
    pair = kept_of(shared.block_pattern)
    if pair is None:
        return
    if not 0 < pair[0] < pair[1]:
        yield (
            "sparse_pruning.shared_parameters.block_pattern",
            f"{shared.block_pattern!r} must keep at least 1 and less than all of its neighbours",
            'Write "2:4" to keep 2 of 4.',
        )
        return
    for group, members in technique.different_groups.items():
        if members.params.dense_ratio not in (0, pair[0] / pair[1]):
            yield (
                f"sparse_pruning.different_groups.{group}.params.dense_ratio",
                f"dense_ratio = {members.params.dense_ratio:g}, and {shared.block_pattern!r} keeps "
                f"{pair[0] / pair[1]:g}",
                "Leave dense_ratio out.",
            )


def _heads(technique: HeadPruning, is_on: bool) -> _Found:
    shared = technique.shared_parameters
    if is_on and not shared.num_heads:
        yield (
            "head_pruning.shared_parameters.num_heads",
            "num_heads must be given",
            'Add for example "num_heads": 12.',
        )
    if is_on and shared.method != "topk":
        yield (
            "head_pruning.shared_parameters.method",
            f"{shared.method!r}: heads are chosen by learned scores alone",
            'Write "topk".',
        )


def _reduction(section: CompressionTraining) -> _Found:
    reduction = section.layer_reduction
    if not reduction.enabled:
        return
    if missing := [key for key in ("module_name_prefix", "teacher_layer") if not getattr(reduction, key)]:
        yield (
            f"layer_reduction.{missing[0]}",
            f"{' and '.join(missing)} must be given",
            'Write for example "module_name_prefix": "transformer.h", "teacher_layer": [0, 2, 4].',
        )
