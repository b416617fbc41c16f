"""`deepspeed.checkpointing`: activation checkpointing under DeepSpeed's and Megatron's names.

`configure` is global, as in DeepSpeed, because `checkpoint` has no argument that could carry settings.  Without it,
the config of the last `deepspeed.initialize` applies.  Each zengine engine has its own
`engine.activation_checkpointing`, made by the same function (build/activation_checkpointing.py).

The RNG tracker is for layers that users split over tensor ranks by hand; layers split by `zpartition.tensor` need
none.  Without a CUDA device it tracks the CPU's generator.
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
from zengine.deepspeed.utils.bwc import bwc_tensor_model_parallel_group, bwc_tensor_model_parallel_rank
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


@attrs.define(eq=False)
class _Current:
    """Settings of `configure`, or of the last engine."""

    is_configured: bool = False
    settings: ActivationCheckpointing = attrs.field(factory=ActivationCheckpointing)
    mp_group: ModelParallelGroup = attrs.field(factory=lambda: ModelParallelGroup(None))  # tensor-parallel ranks
    tensor_rank: int = 0
    instances: dict[Variant, Checkpointing] = attrs.field(factory=dict)  # checkpointing objects of these settings

    def set(self, settings: ActivationCheckpointing, mp_group: ModelParallelGroup) -> None:
        self.settings, self.mp_group, self.instances = settings, mp_group, {}

    def run(self, variant: Variant) -> Checkpointing:
        if variant not in self.instances:
            streams = get_cuda_rng_tracker()
            self.instances[variant] = make_checkpointing(
                self.settings, self.mp_group, streams.device, streams, variant
            )
        return self.instances[variant]


_current = _Current()


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
    """Configure `checkpoint`; arguments that are None come from the config's `activation_checkpointing` section.

    mpu_: provides the tensor-parallel ranks.  partition_activations: each of them keeps a part of the inputs of
    checkpointed blocks.  checkpoint_in_cpu: inputs are kept in host memory.  contiguous_checkpointing: in one buffer
    for `num_checkpoints` inputs of a size.  synchronize: wait for the device before and after each block.
    profile: log the time of each block in forward and in recomputation.

    Raises:
        ConfigError: the section is malformed, or settings conflict.
    """
    given = {
        "partition_activations": partition_activations,
        "contiguous_memory_optimization": contiguous_checkpointing,
        "number_checkpoints": num_checkpoints,
        "cpu_checkpointing": checkpoint_in_cpu,
        "synchronize_checkpoint_boundary": synchronize,
        "profile": profile,
    }
    section = {**_section(deepspeed_config), **{name: value for name, value in given.items() if value is not None}}
    settings = _validated(section)
    mp_group, rank = (_current.mp_group, _current.tensor_rank) if mpu_ is None else _tensor_ranks(mpu_)
    _current.set(settings, mp_group)
    _current.is_configured, _current.tensor_rank = True, rank


def adopt_settings(settings: ActivationCheckpointing, mp_group: ModelParallelGroup) -> None:
    """Use the settings of a new engine, unless `configure` was called."""
    if not _current.is_configured:
        _current.set(settings, mp_group)
        _current.tensor_rank = mp_group.rank


def is_configured() -> bool:
    """Return True if `configure` was called."""
    return _current.is_configured


def reset() -> None:
    """Free the contiguous buffer, for example after forwards without backwards; the next block allocates another."""
    _current.instances = {}


def settings() -> ActivationCheckpointing:
    """Return the current settings."""
    return _current.settings


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Turn splitting of inputs over tensor ranks on or off."""
    _change(partition_activations=partition_activation)


def set_num_layers(nlayers: int) -> None:
    """Set the number of inputs of a size that the contiguous buffer holds."""
    _change(number_checkpoints=nlayers)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function(*args, **kwargs)`; backward recomputes its activations with the same random numbers."""
    return _current.run(Variant.REENTRANT)(function, *args, **kwargs)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Checkpoint without a nested backward: inputs need not require gradients."""
    return _current.run(Variant.HOOKS)(function, *args, **kwargs)


@functools.cache
def get_cuda_rng_tracker() -> RandomStreams:
    """Return the named random streams of the current device: `with get_cuda_rng_tracker().fork(): ...`."""
    return RandomStreams(
        torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )  # at the first call, not at import


def model_parallel_cuda_manual_seed(seed: int) -> None:
    """Seed the device's generator with `seed`, the stream of `fork()` with seed + 2718 + tensor rank."""
    get_cuda_rng_tracker().seed_model_parallel(seed, _current.tensor_rank)


def model_parallel_reconfigure_tp_seed(seed: int) -> None:
    """Reseed the stream of `fork()`."""
    get_cuda_rng_tracker().reseed(seed, _current.tensor_rank)


def _change(**changes: Any) -> None:
    _current.set(_validated({**attrs.asdict(_current.settings), **changes}), _current.mp_group)


def _validated(section: dict[str, Any]) -> ActivationCheckpointing:
    config = load({"activation_checkpointing": section})
    if problems := violations(config):
        raise ConfigError(config.source, problems)
    return config.settings.activation_checkpointing


def _section(source: Any) -> dict[str, Any]:
    """Return the section of a config in any form; empty if there is none."""
    if source is None:
        return {}
    document = read(getattr(source, "given", source)).data  # a plan has the config it was made from
    section = document.get("activation_checkpointing") if isinstance(document, dict) else None
    return section or {}


def _tensor_ranks(mpu: Any) -> tuple[ModelParallelGroup, int]:
    """Return (group, rank) of an mpu's tensor ranks; without a group it may still have a rank, for seeds."""
    group = bwc_tensor_model_parallel_group(mpu)
    mp_group = ModelParallelGroup(None) if group is None else ModelParallelGroup.of(group)
    return mp_group, bwc_tensor_model_parallel_rank(mpu)
