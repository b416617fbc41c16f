"""The engine's activation checkpointing: what the config says, as a callable that runs blocks.

    x = engine.activation_checkpointing(block, x)         # in a loop over blocks, or given to the model

The section says where inputs of checkpointed blocks wait; its key `modules`, or the model, says which blocks are.
There is one for each engine; `zengine.deepspeed.checkpointing` has the one that DeepSpeed keeps for a process.
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
    cell: ModelParallelGroup,
    device: torch.device,
    streams: Streams = NO_STREAMS,
    variant: Variant = Variant.HOOKS,
) -> Checkpointing:
    """Return what `settings` ask for.  cell: the tensor ranks, which have the same activations."""
    store: Store = HostStore() if settings.cpu_checkpointing else DeviceStore()
    if settings.contiguous_memory_optimization:
        store = ArenaStore(settings.number_checkpoints, on_host=settings.cpu_checkpointing)
    asked: dict[str, object] = {}
    if settings.synchronize_checkpoint_boundary:
        asked["synchronize"] = functools.partial(_wait, device)
    if settings.profile:
        asked["span"] = functools.partial(_timed, device)
    saved_inputs = (
        SavedInputs(mp_group=cell, store=store) if settings.partition_activations else SavedInputs(store=store)
    )
    return Checkpointing(saved_inputs=saved_inputs, streams=streams, variant=variant, **asked)  # type: ignore[arg-type]


def checkpointed_blocks(module: nn.Module, plan: Plan, run: Checkpointing) -> CheckpointedBlocks:
    """The blocks that the plan names; in a stage of a pipeline some of the names may be those of other stages.

    A collective of the stages.  ValueError, on all of them, for a pattern that names nothing anywhere.
    """
    stages, names = pipeline_stages_of(module), [name for name, _ in module.named_modules() if name]
    everywhere = zcomm.all_gather_object(names, stages.group) if stages.size > 1 else []
    return CheckpointedBlocks.of(
        module, plan.activations.modules, run, elsewhere=[name for each in everywhere for name in each]
    )


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _timed(device: torch.device, name: str) -> Iterator[None]:
    """Log how long the block took, the device's work included."""
    _wait(device)
    begun = time.perf_counter()
    try:
        yield
    finally:
        _wait(device)
        log.info("%s: %.2f ms", name, 1e3 * (time.perf_counter() - begun))
