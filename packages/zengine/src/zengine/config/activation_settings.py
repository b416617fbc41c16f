"""The settings of activation checkpointing; see `schema` for the conventions.

They say where the inputs of checkpointed blocks wait, and which blocks are, unless the model's forward does.
"""

from __future__ import annotations

import attrs

from zengine.config.kinds import TRUTH, null_or, whole
from zengine.config.precision_settings import NAMES
from zengine.config.table import setting


@attrs.frozen(kw_only=True)
class ActivationCheckpointing:
    """activation_checkpointing: how blocks that are checkpointed keep their inputs."""

    partition_activations: bool = setting(TRUTH, False, "each tensor rank keeps a part of what all of them have")
    cpu_checkpointing: bool = setting(TRUTH, False, "they wait in memory of the host")
    contiguous_memory_optimization: bool = setting(TRUTH, False, "in one piece of memory, made at the first")
    number_checkpoints: int = setting(null_or(whole(0), 0), 0, "how many inputs of a size that piece holds")
    synchronize_checkpoint_boundary: bool = setting(TRUTH, False, "wait for the device before and after each block")
    profile: bool = setting(TRUTH, False, "log the time of each block, forwards and again")
    # Ours: with DeepSpeed the model's code says which.
    modules: tuple[str, ...] = setting(NAMES, (), "blocks that are checkpointed, by patterns of their names")
