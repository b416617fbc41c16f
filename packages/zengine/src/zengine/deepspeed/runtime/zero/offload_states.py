"""`deepspeed.runtime.zero.offload_states`: where an engine's states are; `engine.offload_states` moves them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from zpartition import OffloadStateType

__all__ = ["get_state_devices"]


def get_state_devices(model: Any, state: Any) -> set[torch.device]:
    """Return the devices that hold one kind of state; empty if there is none, or if it is in files.

    model: an engine.  state: an `OffloadStateTypeEnum` or its value.
    """
    kind = OffloadStateType(getattr(state, "value", state))
    partition = model.parts.partition
    offloaded = partition.offloaded
    if offloaded is not None and kind in offloaded.kinds:
        is_in_memory = kind is not OffloadStateType.BUFFERS and not offloaded.stores
        return {torch.device("cpu")} if is_in_memory else set()
    return {tensor.device for tensor in _tensors(model, partition, kind)}


def _tensors(model: Any, partition: Any, kind: OffloadStateType) -> Iterable[Tensor]:
    if kind is OffloadStateType.STATES:
        states = [] if model.optimizer is None else model.optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]
    if kind is OffloadStateType.MASTERS:
        return [storage.master for storage in partition.storages]
    if kind is OffloadStateType.WEIGHTS:
        return [storage.own_span for storage in partition.storages]
    if kind is OffloadStateType.GRADIENTS:
        return [gradient.kept for gradient in partition.reducer.gradients if gradient.kept is not None]
    return [torch.empty(0, device=partition.device)]
