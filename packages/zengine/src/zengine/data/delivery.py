"""The last metre of a batch: from the host to the device, while the step before is still computed.

A batch is copied on a stream of its own out of page-locked memory, and the stream that computes waits for that
copy alone.  With worker processes one or more batches are on the device ahead of their use.  Without workers nothing
is fetched ahead: the dataset runs in this process and may draw from its generators, which a checkpoint taken now must
not find moved by batches that nobody has seen.  The copy still overlaps with the computing that is queued.

On a CPU the batches are where they are needed; delivery is the identity.
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
    """The identity."""
    return batches


def delivery_to(
    device: torch.device, *, num_ahead: int, num_workers: int
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """How batches get to `device`: as they come on a CPU or where `num_ahead` is 0."""
    if device.type == "cpu" or num_ahead == 0:
        return as_they_come
    return ToDevice(device=device, num_ahead=num_ahead if num_workers else 0)


@final
@attrs.frozen(kw_only=True)
class ToDevice:
    """Copies batches to `device`, `num_ahead` of them before they are asked for."""

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
    """For devices without streams: a copy is over when it returns."""

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
        """The batch, for the current stream, which waits for its copy and keeps its memory."""
        batch, arrived = sent
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(arrived)
        for tensor in tensors(batch):
            tensor.record_stream(current)
        return batch
