"""Replica groups of "diloco": their number, and what cannot be combined with them.

A group is one position along the axis `replicate` of hybrid sharding, so inside a group everything is as in a run of
its own: the stages of ZeRO, shard groups of several copies, tensor, sequence, pipeline and expert ranks.
"""

from __future__ import annotations

from zengine.config.grammar.errors import Problem
from zengine.config.plan.facts import Facts
from zengine.config.reading.load import Config, at, violation

__all__ = ["check_diloco", "diloco_notices", "replica_groups"]

_SECTION = "diloco.sync_every"
_SHARDS = "zero_optimization.shard_group_size"


def replica_groups(config: Config, facts: Facts, data_ranks: int, sequence: int) -> int | Problem:
    """Return the number of replica groups among `data_ranks` replicas of `sequence` ranks each."""
    asked, laid_out = config.settings.diloco.groups, facts.axes.get("replicate", 0)
    if asked and laid_out not in (0, asked):
        return violation(
            config,
            "diloco.groups",
            f"{at(config, 'diloco.groups')} = {asked}, and {facts.axes_source} has {laid_out} along `replicate`",
            f"Make it {laid_out}, or leave it out: {facts.axes_source} decides.",
        )
    shard = config.settings.zero_optimization.shard_group_size
    ranks = data_ranks * sequence
    groups = asked or laid_out or (ranks // shard if shard and ranks % shard == 0 else 0 if shard else data_ranks)
    if groups and data_ranks % groups == 0:
        return groups
    divisors = ", ".join(str(number) for number in range(1, data_ranks + 1) if data_ranks % number == 0)
    key = "diloco.groups" if asked else _SHARDS
    return violation(
        config,
        key,
        f"{at(config, key)} = {asked or shard} does not divide the {data_ranks} replicas of this run into whole "
        "replica groups of diloco",
        f"Choose diloco.groups of {divisors}, or leave both keys out for one group a replica.",
    )


def check_diloco(config: Config) -> Problem | None:
    """Reject a round that its fragments or delay do not fit into, and features that need equal weights each step."""
    section = config.settings.diloco
    if not section.sync_every:
        return None
    between = section.sync_every // section.fragments
    if not between:
        return violation(
            config,
            "diloco.fragments",
            f"{at(config, 'diloco.fragments')} = {section.fragments} fragments are exchanged in a round of "
            f"{at(config, _SECTION)} = {section.sync_every} steps, at most one in a step",
            f"Use at most {section.sync_every} fragments.",
        )
    if section.sync_delay >= between:
        return violation(
            config,
            "diloco.sync_delay",
            f"{at(config, 'diloco.sync_delay')} = {section.sync_delay} steps reach the next exchange, which begins "
            f"{between} steps later (sync_every {section.sync_every} / {section.fragments} fragments)",
            f"Use at most {between - 1}.",
        )
    if section.quantize_bits not in (0, 4, 8):
        return violation(
            config,
            "diloco.quantize_bits",
            f"{at(config, 'diloco.quantize_bits')} = {section.quantize_bits} is no size of a code",
            "Use 4 or 8, or null for float32.",
        )
    return _check_others(config)


def _check_others(config: Config) -> Problem | None:
    """Reject features that diloco cannot be combined with."""
    settings = config.settings
    if settings.zero_optimization.offload_optimizer.device == "nvme":
        key = "zero_optimization.offload_optimizer.device"
        return violation(
            config,
            key,
            f'{at(config, key)} = "nvme" keeps the master weights on a drive, and diloco reads and writes a part of '
            "them in each exchange",
            'Use "cpu", or leave diloco out.',
        )
    if settings.diloco.start_step and settings.zero_optimization.offload_optimizer.super_offload:
        key = "zero_optimization.offload_optimizer.super_offload"
        return violation(
            config,
            key,
            f"{at(config, key)} updates weights before all gradients have arrived, and up to "
            f"{at(config, 'diloco.start_step')} = {settings.diloco.start_step} the groups average them first",
            "Leave one of the two out.",
        )
    if settings.hybrid_engine.enabled:
        key = "hybrid_engine.enabled"
        return violation(
            config,
            key,
            f"{at(config, key)} generates with the weights of all ranks, and with diloco the groups have different "
            "ones",
            "Leave one of the two sections out.",
        )
    return None


def diloco_notices(config: Config, num_groups: int) -> list[str]:
    """Return notices of keys of diloco without effect, or with an unexpected one."""
    section = config.settings.diloco
    if not section.sync_every:
        return []
    found = []
    if num_groups == 1:
        found.append(
            f"{config.origin(_SECTION)}: diloco has one replica group here, which exchanges nothing; its outer step "
            f"still moves the weights every {section.sync_every} steps. For several, run two replicas or more, with "
            "diloco.groups = 2 or more"
        )
    if section.sync_delay and not section.merge_alpha:
        found.append(
            f"{config.origin('diloco.sync_delay')}: diloco.sync_delay = {section.sync_delay} and merge_alpha 0 "
            "drop the local steps run while a fragment is exchanged; 0.5, as in Streaming DiLoCo, keeps half of them"
        )
    if section.quantize_bits and num_groups == 1:
        found.append(
            f"{config.origin('diloco.quantize_bits')}: diloco.quantize_bits has no effect here: the only "
            "group sends nothing"
        )
    if section.outer.nesterov and not section.outer.momentum and "diloco.outer.nesterov" in config.given:
        found.append(
            f"{config.origin('diloco.outer.nesterov')}: diloco.outer.nesterov has no effect here: momentum is 0"
        )
    return found
