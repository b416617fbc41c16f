"""Activation checkpointing by the config's section, as a callable that runs blocks.

    x = engine.activation_checkpointing(block, x)         # in a loop over blocks, or passed to the model

The section chooses where the inputs of checkpointed blocks are kept; its key `modules`, or the model, chooses the
blocks.  Each engine has its own; `zengine.deepspeed.checkpointing` is the one per process that DeepSpeed has.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

import zcomm
from zpartition import ModelParallelGroup, pipeline_stages_of
from zpartition.activations import (
    NO_STREAMS,
    ArenaStore,
    CheckpointedBlocks,
    Checkpointing,
    DeviceStore,
    HostStore,
    SavedInputs,
    Store,
    Streams,
    Variant,
)

if TYPE_CHECKING:
    from zengine.config import Plan
    from zengine.config.plan.parallel import ActivationCheckpointing

log = logging.getLogger("zengine")


def make_checkpointing(
    settings: ActivationCheckpointing,
    mp_group: ModelParallelGroup,
    device: torch.device,
    streams: Streams = NO_STREAMS,
    variant: Variant = Variant.HOOKS,
) -> Checkpointing:
    """Return the checkpointing that `settings` describe.  mp_group: tensor ranks, which have the same activations."""
    store: Store = HostStore() if settings.cpu_checkpointing else DeviceStore()
    if settings.contiguous_memory_optimization:
        store = ArenaStore(settings.number_checkpoints, on_host=settings.cpu_checkpointing)
    options: dict[str, object] = {}
    if settings.synchronize_checkpoint_boundary:
        options["synchronize"] = functools.partial(_synchronize, device)
    if settings.profile:
        options["span"] = functools.partial(_log_time, device)
    saved_inputs = (
        SavedInputs(mp_group=mp_group, store=store) if settings.partition_activations else SavedInputs(store=store)
    )
    return Checkpointing(saved_inputs=saved_inputs, streams=streams, variant=variant, **options)  # type: ignore[arg-type]


def checkpointed_blocks(module: nn.Module, plan: Plan, run: Checkpointing) -> CheckpointedBlocks:
    """Return the blocks that the plan names.  A collective of a pipeline's stages, whose names count together.

    Raises:
        ValueError: on all ranks, for a pattern that matches no block of any stage.
    """
    stages, names = pipeline_stages_of(module), [name for name, _ in module.named_modules() if name]
    everywhere = zcomm.all_gather_object(names, stages.group) if stages.size > 1 else []
    return CheckpointedBlocks.of(
        module, plan.activations.modules, run, elsewhere=[name for each in everywhere for name in each]
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _log_time(device: torch.device, name: str) -> Iterator[None]:
    """Log the time of the block, with the device's work."""
    _synchronize(device)
    begun = time.perf_counter()
    try:
        yield
    finally:
        _synchronize(device)
        log.info("%s: %.2f ms", name, 1e3 * (time.perf_counter() - begun))
