"""`deepspeed.checkpointing`: activation checkpointing under DeepSpeed's and Megatron's names.

`configure` is global in DeepSpeed, because `checkpoint` has no argument that could carry settings; so it is here.
Who has not called it has what the config of the last `deepspeed.initialize` says.  Engines of zengine have each their
own, `engine.activation_checkpointing`, made by the same hand (activation_checkpointing.py).

The tracker holds random numbers of layers that users split over tensor ranks by hand; what `zpartition.tensor` has
split needs none.  Where there is no CUDA device it tracks the CPU's generator.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import attrs
import torch

from zengine.build.activation_checkpointing import make_checkpointing
from zengine.config import ConfigError, load, violations
from zengine.config.grammar.source import read
from zengine.config.keys.parallel import ActivationCheckpointing
from zpartition import ModelParallelGroup
from zpartition.activations import Checkpointing, RandomStreams, Variant

__all__ = [
    "checkpoint",
    "configure",
    "get_cuda_rng_tracker",
    "is_configured",
    "model_parallel_cuda_manual_seed",
    "model_parallel_reconfigure_tp_seed",
    "non_reentrant_checkpoint",
    "partition_activations_in_checkpoint",
    "reset",
    "set_num_layers",
    "settings",
]

# Names of getters by which an mpu tells its tensor ranks; Megatron has renamed them.
_GROUPS = ("get_tensor_model_parallel_group", "get_model_parallel_group", "get_slice_parallel_group")
_RANKS = ("get_tensor_model_parallel_rank", "get_model_parallel_rank", "get_slice_parallel_rank")


@attrs.define(eq=False)
class _Present:
    """What `configure` was told, or the last engine's."""

    is_configured: bool = False
    settings: ActivationCheckpointing = attrs.field(factory=ActivationCheckpointing)
    cell: ModelParallelGroup = attrs.field(factory=lambda: ModelParallelGroup(None))  # of the tensor ranks
    tensor_rank: int = 0
    made: dict[Variant, Checkpointing] = attrs.field(factory=dict)  # of these settings

    def take(self, settings: ActivationCheckpointing, cell: ModelParallelGroup) -> None:
        self.settings, self.cell, self.made = settings, cell, {}

    def run(self, variant: Variant) -> Checkpointing:
        if variant not in self.made:
            streams = get_cuda_rng_tracker()
            self.made[variant] = make_checkpointing(self.settings, self.cell, streams.device, streams, variant)
        return self.made[variant]


_present = _Present()


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Say how `checkpoint` works; the config's `activation_checkpointing` section where an argument is None.

    mpu_: tells the tensor ranks, over which activations are split.  partition_activations: each of them keeps a part
    of the inputs of checkpointed blocks.  checkpoint_in_cpu: they wait in host memory.  contiguous_checkpointing: in
    one piece of memory for `num_checkpoints` of a size.  synchronize: wait for the device around each block.
    profile: log its time, forwards and again.

    Raises:
        ConfigError: the section is malformed, or settings do not go together.
    """
    asked = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = {**_section(deepspeed_config), **{name: value for name, value in asked.items() if value is not None}}
    settings = _checked(section)
    cell, rank = (_present.cell, _present.tensor_rank) if mpu_ is None else _tensor_ranks(mpu_)
    _present.take(settings, cell)
    _present.is_configured, _present.tensor_rank = True, rank


def follow(settings: ActivationCheckpointing, cell: ModelParallelGroup) -> None:
    """The config of an engine that was made; counts unless `configure` was called."""
    if not _present.is_configured:
        _present.take(settings, cell)
        _present.tensor_rank = cell.rank


def is_configured() -> bool:
    """Return whether `configure` was called."""
    return _present.is_configured


def reset() -> None:
    """Let go of the one piece of memory, for forwards without backwards, say; the next block makes another."""
    _present.made = {}


def settings() -> ActivationCheckpointing:
    """Return what counts now."""
    return _present.settings


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Split inputs over the tensor ranks from now on, or no longer."""
    _change(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """How many inputs of a size the one piece of memory holds."""
    _change(number_checkpoints=nlayers)


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in backward; random numbers are the same."""
    return _present.run(Variant.REENTRANT)(function, *args)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same without a nested backward: inputs need not require gradients."""
    return _present.run(Variant.HOOKS)(function, *args)


@functools.cache
def get_cuda_rng_tracker() -> RandomStreams:
    """Named streams of random numbers of the current device: `with get_cuda_rng_tracker().fork(): ...`."""
    return RandomStreams(torch.device("cuda" if torch.cuda.is_available() else "cpu"))  # asked now, not at import


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device: its own numbers by `seed`, those inside `fork()` by seed + 2718 + tensor rank."""
    get_cuda_rng_tracker().seed_model_parallel(seed, _present.tensor_rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Seed what is drawn inside `fork()` anew."""
    get_cuda_rng_tracker().reseed(seed, _present.tensor_rank)


def _change(**changes: Any) -> None:
    _present.take(_checked({**attrs.asdict(_present.settings), **changes}), _present.cell)


def _checked(section: dict[str, Any]) -> ActivationCheckpointing:
    config = load({"activation_checkpointing": section})
    if problems := violations(config):
        raise ConfigError(config.source, problems)
    return config.settings.activation_checkpointing


def _section(source: Any) -> dict[str, Any]:
    """The section of a config in any form; empty without one."""
    if source is None:
        return {}
    document = read(source).data
    section = document.get("activation_checkpointing") if isinstance(document, dict) else None
    return section or {}


def _tensor_ranks(mpu: Any) -> tuple[ModelParallelGroup, int]:
    """Return what an mpu tells of them; one that names no group has a rank perhaps, for seeds."""
    group = next((getattr(mpu, name)() for name in _GROUPS if hasattr(mpu, name)), None)
    cell = ModelParallelGroup(None) if group is None else ModelParallelGroup.of(group)
    return cell, next((int(getattr(mpu, name)()) for name in _RANKS if hasattr(mpu, name)), cell.rank)
