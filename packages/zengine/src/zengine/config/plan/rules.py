"""Rules between keys: each message has both keys, their places, and the one to change.

A rule is a function from a config to a problem or None; `RULES` is the list.  No rule needs a machine, so
`zengine check` applies them anywhere; the batch equation (batch.py) needs the number of replicas.
"""

from __future__ import annotations

from collections.abc import Callable

from zengine.config.grammar.errors import Problem
from zengine.config.plan.data_rules import data_violations
from zengine.config.plan.moq import check_moq_bits
from zengine.config.plan.precision_rules import PRECISION_RULES
from zengine.config.plan.replica_groups import check_diloco
from zengine.config.plan.techniques.compression import compression_violations
from zengine.config.plan.techniques.zenflow import check_zenflow
from zengine.config.reading.load import Config
from zengine.config.reading.load import at as _at
from zengine.config.reading.load import violation as _violation

Rule = Callable[[Config], Problem | None]


def check_reduce_at(config: Config) -> Problem | None:
    """Reject reduce_at "boundary" from stage 2 on: it needs full local gradients, which these stages avoid."""
    zero = config.settings.zero_optimization
    if zero.stage < 2 or zero.reduce_at != "boundary":
        return None
    return _violation(
        config,
        "zero_optimization.reduce_at",
        f'{_at(config, "zero_optimization.reduce_at")} = "boundary" keeps a full gradient on every rank, which '
        f"{_at(config, 'zero_optimization.stage')} = {zero.stage} avoids",
        'Use stage 1 for one reduction per step, or "micro_step".',
    )


def check_scale_floor(config: Config) -> Problem | None:
    """Require an initial dynamic loss scale of at least min_loss_scale."""
    fp16 = config.settings.fp16
    start = 2.0**fp16.initial_scale_power
    if not fp16.enabled or fp16.loss_scale or fp16.min_loss_scale <= start:
        return None
    return _violation(
        config,
        "fp16.min_loss_scale",
        f"{_at(config, 'fp16.min_loss_scale')} = {fp16.min_loss_scale:g} is above the first scale, 2 to the "
        f"{_at(config, 'fp16.initial_scale_power')} {fp16.initial_scale_power} = {start:g}",
        "Lower the floor or raise the power.",
    )


def check_shard_group_stage(config: Config) -> Problem | None:
    """Reject shard_group_size at stage 0, where nothing is sharded."""
    zero, key = config.settings.zero_optimization, "zero_optimization.shard_group_size"
    if zero.stage or not zero.shard_group_size:
        return None
    return _violation(
        config,
        key,
        f"{_at(config, key)} = {zero.shard_group_size}, but at stage 0 nothing is sharded",
        'Set "stage" to 1, 2 or 3, or leave shard_group_size out.',
    )


def check_nvme_path(config: Config) -> Problem | None:
    """Require a path for offload to nvme, the same for both sections."""
    zero = config.settings.zero_optimization
    states, weights = zero.offload_optimizer, zero.offload_param
    named = {
        "offload_optimizer": (states.device, states.nvme_path),
        "offload_param": (weights.device, weights.nvme_path),
    }
    if zero.stage < 3:
        del named["offload_param"]
    on_disk = {name: path for name, (device, path) in named.items() if device == "nvme"}
    for name, path in on_disk.items():
        if not path:
            key = f"zero_optimization.{name}.device"
            return _violation(
                config,
                key,
                f'{_at(config, key)} = "nvme" needs a folder on a local drive',
                f'Add "nvme_path": "/local/nvme" to {name}.',
            )
    if len(set(on_disk.values())) > 1:
        key = "zero_optimization.offload_param.nvme_path"
        return _violation(
            config,
            key,
            f"{_at(config, key)} and {_at(config, 'zero_optimization.offload_optimizer.nvme_path')} differ",
            "Give both the same folder: each rank creates its own folder in it.",
        )
    return None


def check_compressed_optimizer(config: Config) -> Problem | None:
    """Reject compressed optimizers at stages where no rank has what they average."""
    name, stage = config.settings.optimizer.type, config.settings.zero_optimization.stage
    highest = {"onebitadam": 1, "onebitlamb": 1, "zerooneadam": 0}.get(name.lower(), 3)
    if stage <= highest:
        return None
    reason = (
        "between synchronizations every rank updates all weights by its own momenta, so both differ from rank to rank"
        if not highest
        else "ranks average their whole momenta in one bit an element"
    )
    return _violation(
        config,
        "zero_optimization.stage",
        f"{_at(config, 'zero_optimization.stage')} = {stage} shards what {name} needs whole on every rank: {reason}",
        f"Set the stage to {highest}{'' if highest == 0 else ' or 0'}, or use "
        f"{'' if highest else 'OneBitAdam, which shards its states at stage 1, or '}"
        f"{'AdamW' if 'adam' in name.lower() else 'LAMB'}.",
    )


def check_keep_last(config: Config) -> Problem | None:
    """Require checkpoint.keep.last beside its other keys, which alone would delete the newest checkpoints."""
    keep = config.settings.checkpoint.keep
    added = [f"checkpoint.keep.{key}" for key in ("every", "best", "tags") if getattr(keep, key)]
    if keep.last or not added:
        return None
    return _violation(
        config,
        added[0],
        f"{_at(config, added[0])} extends checkpoint.keep.last, which is not set",
        "Set checkpoint.keep.last to 1 or more, or leave the section out to keep all checkpoints.",
    )


def check_contiguous_checkpointing(config: Config) -> Problem | None:
    """Require the keys that size the buffer of contiguous_memory_optimization."""
    section = config.settings.activation_checkpointing
    if not section.contiguous_memory_optimization:
        return None
    needed = [name for name in ("partition_activations", "number_checkpoints") if not getattr(section, name)]
    if not needed:
        return None
    key = "activation_checkpointing.contiguous_memory_optimization"
    return _violation(
        config,
        key,
        f"{_at(config, key)} keeps parts of activations in one buffer, and {' and '.join(needed)} "
        f"{'is' if len(needed) == 1 else 'are'} not set",
        'Set "partition_activations" to true and "number_checkpoints" to the number of checkpointed blocks, or leave '
        "it out.",
    )


def check_signals_save_dir(config: Config) -> Problem | None:
    """Require a folder for signals that save."""
    signals = config.settings.signals
    saving = [key for key in ("sigterm", "sigusr1") if getattr(signals, key).startswith("checkpoint")]
    exits = "signals.exit_code" in config.given
    if signals.save_dir or not (saving or (exits and not signals.actions)):
        return None
    key = f"signals.{saving[0]}" if saving else "signals.exit_code"
    value = f'"{getattr(signals, saving[0])}"' if saving else signals.exit_code
    return _violation(
        config,
        key,
        f"{_at(config, key)} = {value}, but signals.save_dir is not set, so there is no folder to save into",
        'Add "save_dir": "checkpoints" to the section (the folder that you pass to save_checkpoint), or write '
        '"sigterm": "exit" to leave without a save.',
    )


RULES: tuple[Rule, ...] = (
    *PRECISION_RULES,
    check_reduce_at,
    check_scale_floor,
    check_shard_group_stage,
    check_nvme_path,
    check_compressed_optimizer,
    check_keep_last,
    check_signals_save_dir,
    check_contiguous_checkpointing,
    check_diloco,
    check_moq_bits,
    check_zenflow,
)


def violations(config: Config) -> list[Problem]:
    """Return a problem for every rule that `config` breaks."""
    found = [problem for rule in RULES if (problem := rule(config)) is not None]
    return [*found, *data_violations(config), *compression_violations(config)]
