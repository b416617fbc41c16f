"""`deepspeed.checkpointing`: torch's activation checkpointing under DeepSpeed's names.

`configure` is global in DeepSpeed, because `checkpoint` has no argument that could carry settings; so it is here.
Splitting checkpoints over tensor-parallel ranks is refused: there are none yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch.utils.checkpoint import checkpoint as _checkpoint

from zengine.deepspeed.later import NotAvailable

__all__ = ["checkpoint", "configure", "is_configured", "non_reentrant_checkpoint", "reset"]


@attrs.define
class _Settings:
    """What `configure` was told."""

    is_configured: bool = False
    place: Callable[[], AbstractContextManager[Any]] = nullcontext  # where inputs of checkpointed blocks wait


_settings = _Settings()


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

    checkpoint_in_cpu: inputs of checkpointed blocks wait in host memory.  num_checkpoints, contiguous_checkpointing,
    synchronize and profile are accepted: they tune buffers that do not exist here.

    Raises NotAvailable for partition_activations.
    """
    section = deepspeed_config.get("activation_checkpointing", {}) if isinstance(deepspeed_config, dict) else {}
    is_split = section.get("partition_activations", False) if partition_activations is None else partition_activations
    if is_split:
        raise NotAvailable(
            "checkpointing.configure(partition_activations=True): it splits activations over tensor-parallel ranks, "
            "which are not available yet. Leave it False; checkpoint_in_cpu=True frees the device's memory."
        )
    in_cpu = section.get("cpu_checkpointing", False) if checkpoint_in_cpu is None else checkpoint_in_cpu
    _settings.is_configured = True
    _settings.place = torch.autograd.graph.save_on_cpu if in_cpu else nullcontext


def is_configured() -> bool:
    """Whether `configure` was called since the start or `reset`."""
    return _settings.is_configured


def reset() -> None:
    """Forget what `configure` was told."""
    _settings.is_configured, _settings.place = False, nullcontext


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, whose activations are computed again in backward; random numbers are the same."""
    with _settings.place():
        return _checkpoint(function, *args, use_reentrant=True)


def non_reentrant_checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """The same without a nested backward: inputs need not require gradients."""
    with _settings.place():
        return _checkpoint(function, *args, use_reentrant=False)
