"""Plan of a mixture of quantization: groups of weights with their bits, from the section quantize_training."""

from __future__ import annotations

import re
from typing import Literal

import attrs

from zengine.config.grammar.errors import Problem
from zengine.config.keys.compression import WeightQuantization
from zengine.config.keys.features import QuantizeTraining
from zengine.config.keys.root import Settings
from zengine.config.reading.load import Config, at, violation

__all__ = ["MoqGroup", "MoqPlan", "check_moq_bits", "moq_plan"]


@attrs.frozen(kw_only=True)
class MoqGroup:
    """Weights that have the same bits."""

    patterns: tuple[str, ...]  # regular expressions, searched in names of parameters, or of their modules
    start_bits: int
    target_bits: int
    period: int  # steps after the offset until the first bit is lost
    by_module: bool = False  # patterns are of modules, and only their parameter "weight" is rounded

    def holds(self, name: str) -> bool:
        """Return whether a parameter of that name is in the group."""
        module, _, own = name.rpartition(".")
        if self.by_module and own != "weight":
            return False
        return any(re.search(pattern, module if self.by_module else name) for pattern in self.patterns)


@attrs.frozen(kw_only=True)
class MoqPlan:
    """Rounding of weights after each update."""

    section: str = "quantize_training"  # of the config, for messages
    groups: tuple[MoqGroup, ...] = ()  # the first that holds a weight decides; (): off
    offset: int = 0  # applied updates before the first rounding
    num_groups: int = 1  # parts of a weight with a scale each
    kind: Literal["symmetric", "asymmetric"] = "symmetric"
    rounding: str = "nearest"  # or "stochastic"
    change_ratio: float = 0.0  # fall of the full weights' share, per step; 0: weights are rounded at once
    verbose: bool = False

    def group_of(self, name: str) -> MoqGroup | None:
        """Return the group of a parameter; None if it is not rounded."""
        return next((group for group in self.groups if group.holds(name)), None)


def moq_plan(settings: Settings) -> MoqPlan:
    """Return the plan of quantize_training, or of weights that compression_training rounds outside of forward."""
    section: QuantizeTraining = settings.quantize_training
    if not section.enabled:
        return _of_compression(settings.compression_training.weight_quantization)
    group = MoqGroup(
        patterns=section.modules or ("",),
        start_bits=section.quantize_bits.start_bits,
        target_bits=section.quantize_bits.target_bits,
        period=section.quantize_schedule.quantize_period,
    )
    mixed = section.fp16_mixed_quantize
    return MoqPlan(
        groups=(group,),
        offset=section.quantize_schedule.schedule_offset,
        num_groups=section.quantize_groups,
        kind="asymmetric" if section.quantize_algo.q_type == "asymmetric" else "symmetric",
        rounding=section.quantize_algo.rounding,
        change_ratio=mixed.quantize_change_ratio if mixed.enabled else 0.0,
        verbose=section.quantize_verbose,
    )


def _of_compression(section: WeightQuantization) -> MoqPlan:
    shared = section.shared_parameters
    if not shared.enabled or shared.quantize_weight_in_forward:
        return MoqPlan()
    groups = tuple(
        MoqGroup(
            patterns=tuple("" if pattern == "*" else pattern for pattern in group.modules),
            start_bits=group.params.start_bits,
            target_bits=group.params.target_bits,
            period=group.params.quantization_period,
            by_module=True,
        )
        for group in section.different_groups.values()
    )
    mixed = shared.fp16_mixed_quantize
    return MoqPlan(
        section="compression_training.weight_quantization",
        groups=groups,
        offset=shared.schedule_offset,
        num_groups=shared.quantize_groups,
        kind="asymmetric" if shared.quantization_type == "asymmetric" else "symmetric",
        rounding=shared.rounding,
        change_ratio=mixed.quantize_change_ratio if mixed.enabled else 0.0,
        verbose=shared.quantize_verbose,
    )


def check_moq_bits(config: Config) -> Problem | None:
    """Reject bits that rise, and asymmetric rounding to fewer than 3 bits."""
    section = config.settings.quantize_training
    bits, key = section.quantize_bits, "quantize_training.quantize_bits.target_bits"
    if not section.enabled:
        return None
    if bits.target_bits > bits.start_bits:
        return violation(
            config,
            key,
            f"{at(config, key)} = {bits.target_bits} is above "
            f"{at(config, 'quantize_training.quantize_bits.start_bits')} = {bits.start_bits}: bits only fall",
            "Lower it, or raise start_bits.",
        )
    if bits.target_bits < 3 and section.quantize_algo.q_type == "asymmetric":
        return violation(
            config,
            key,
            f"{at(config, key)} = {bits.target_bits} is ternary or binary, which has no zero point, and "
            f"{at(config, 'quantize_training.quantize_algo.q_type')} is asymmetric",
            'Use at least 3 bits, or "q_type": "symmetric".',
        )
    return None
