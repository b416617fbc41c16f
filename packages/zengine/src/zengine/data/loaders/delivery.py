"""Transfer of batches to the device, overlapped with the previous step.

A side stream copies a batch out of page-locked memory, and the compute stream waits for that copy alone.  With worker
processes one or more batches are on the device ahead of their use.  Without workers nothing is fetched ahead: the
dataset runs in this process and may draw from its generators, which a checkpoint taken now must not find advanced by
batches that nobody has seen.  The copy still overlaps with queued computation.

On a CPU the transfer is the identity.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, final

import attrs
import torch
from torch import Tensor

from zengine.data.tree import mapped, tensors


def as_they_come(batches: Iterator[Any]) -> Iterator[Any]:
    """Identity: leave batches where they are."""
    return batches


def delivery_to(
    device: torch.device, *, num_ahead: int, num_workers: int
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Return the transfer to `device`: the identity on a CPU or if `num_ahead` is 0."""
    if device.type == "cpu" or num_ahead == 0:
        return as_they_come
    return ToDevice(device=device, num_ahead=num_ahead if num_workers else 0)


@final
@attrs.frozen(kw_only=True)
class ToDevice:
    """Copies batches to `device`, `num_ahead` of them before they are requested."""

    device: torch.device
    num_ahead: int  # batches on the device that the caller does not have yet

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        has_streams = self.device.type == "cuda"
        lane = _Lane(torch.cuda.Stream(self.device)) if has_streams else _Direct()  # type: ignore[no-untyped-call]
        under_way: deque[Any] = deque()
        for batch in batches:
            under_way.append(lane.send(batch, self.device))
            if len(under_way) > self.num_ahead:
                yield lane.receive(under_way.popleft())
        while under_way:
            yield lane.receive(under_way.popleft())


class _Direct:
    """Synchronous copies, for devices without streams."""

    def send(self, batch: Any, device: torch.device) -> Any:
        return mapped(batch, lambda tensor: tensor.to(device))

    def receive(self, sent: Any) -> Any:
        return sent


@attrs.frozen
class _Lane(_Direct):
    """Copies on a CUDA stream."""

    stream: torch.cuda.Stream

    def send(self, batch: Any, device: torch.device) -> tuple[Any, torch.cuda.Event]:
        def copy(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=tensor.is_pinned())

        with torch.cuda.stream(self.stream):
            moved = mapped(batch, copy)
            return moved, self.stream.record_event()

    def receive(self, sent: tuple[Any, torch.cuda.Event]) -> Any:
        """Return the batch to the current stream, which waits for the copy and keeps its memory."""
        batch, arrived = sent
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(arrived)
        for tensor in tensors(batch):
            tensor.record_stream(current)
        return batch
