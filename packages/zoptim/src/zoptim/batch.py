"""Sorting the tensors of a parameter group into batches that one kernel call can update.

A kernel wants tensors of one device, one dtype and one memory layout.  Deciding which tensors go
together is a plan; carrying it out is the optimizer's `_update`.  A kernel of our own joins here as
one more `Path`, chosen in `path_of`.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from ._compat import FusedOn, Signals, has_fused_kernel

__all__ = ["Batch", "Entry", "Path", "plan_batches", "read_signals"]

# What a step divides by when nobody set a grad_scale.  Not None: torch.amp.GradScaler multiplies its
# own scale with the attribute it finds.  Known by identity, so nothing is divided.
NO_SCALE = torch.ones(())


class Path(enum.Enum):
    """How a batch is updated.  Same meaning, different cost."""

    FUSED = "fused"  # one pass over memory; no read of the host
    FOREACH = "foreach"  # several passes and temporaries of the batch's size; reads found_inf on the host


@attrs.frozen(eq=False)
class Entry:
    """One parameter with what its update reads and writes."""

    param: Tensor  # any shape, floating
    grad: Tensor  # the parameter's shape and dtype
    state: dict[str, Any]  # the optimizer's own, by torch's names


@attrs.frozen(eq=False)
class Batch:
    """Entries of one group that share device, dtype and path."""

    path: Path
    entries: list[Entry]
    signals: Signals  # on the batch's device

    @property
    def params(self) -> list[Tensor]:
        return [entry.param for entry in self.entries]

    @property
    def grads(self) -> list[Tensor]:
        return [entry.grad for entry in self.entries]

    def state(self, key: str) -> list[Tensor]:
        """The state tensors called `key`, in the order of the parameters."""
        return [entry.state[key] for entry in self.entries]

    def is_skipped(self) -> bool:
        """found_inf as the host sees it.  Waits for the device."""
        return self.signals.found_inf is not None and bool(self.signals.found_inf)


def plan_batches(
    group: Mapping[str, Any], entries: Iterable[Entry], signals: Signals, fused_on: FusedOn
) -> list[Batch]:
    """Sort `entries` by (path, device, dtype), keeping their order inside each batch."""
    bins: dict[tuple[Path, torch.device, torch.dtype], list[Entry]] = {}
    for entry in entries:
        key = (path_of(group, entry, fused_on), entry.param.device, entry.param.dtype)
        bins.setdefault(key, []).append(entry)
    return [Batch(path, members, _beside(signals, device)) for (path, device, _), members in bins.items()]


def path_of(group: Mapping[str, Any], entry: Entry, fused_on: FusedOn) -> Path:
    """The fastest path that is correct for this entry and that the group's options allow."""
    if group["foreach"] or group["fused"] is False or not has_fused_kernel(entry.param, fused_on):
        return Path.FOREACH
    states = (value for key, value in entry.state.items() if key != "step" and isinstance(value, Tensor))
    tensors = [entry.grad, *states]
    return Path.FUSED if _same_memory_layout(entry.param, tensors) else Path.FOREACH


def read_signals(grad_scale: Any, found_inf: Any) -> Signals:
    """The optimizer's two attributes as kernels want them: () float32, found_inf exactly 0 or 1."""
    if grad_scale is NO_SCALE:
        grad_scale = None
    for name, value in (("grad_scale", grad_scale), ("found_inf", found_inf)):
        if value is not None and not (isinstance(value, Tensor) and value.numel() == 1):
            raise TypeError(f"{name} is {value!r}; it must be a tensor of one element, or None.")
    return Signals(
        grad_scale=None if grad_scale is None else grad_scale.detach().reshape(()).float(),
        found_inf=None if found_inf is None else (found_inf.detach().reshape(()) != 0).float(),
    )


def _same_memory_layout(param: Tensor, others: list[Tensor]) -> bool:
    """Whether element i in memory is the same element in all tensors, with no gaps between."""
    if param.is_contiguous() and all(other.is_contiguous() for other in others):
        return True
    return _is_channels_last(param) and all(other.stride() == param.stride() for other in others)


def _is_channels_last(tensor: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])


def _beside(signals: Signals, device: torch.device) -> Signals:
    """The same signals on `device`.  Copies only across devices, without waiting."""

    def move(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device, non_blocking=True)

    return Signals(grad_scale=move(signals.grad_scale), found_inf=move(signals.found_inf))
