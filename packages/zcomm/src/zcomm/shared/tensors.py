"""Tensors whose memory all ranks of a group have mapped.

A collective over a tensor of its own copies it through staging buffers; over one made here it works in place, in the
memory of all ranks.  Making one is a collective: the ranks offer each other a segment each, through the transport
that they have already, and map the others'.  Every rank must get what it asked for or all get ordinary memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm.collectives import group_size
from zcomm.handles import CollectiveFailed
from zcomm.shared.lane import Step
from zcomm.shared.registry import Carrier, transport_of
from zcomm.shared.segment import Memory, Offer, Segment
from zcomm.shared.transport import Message, SharedMemoryFailed, Transport

__all__ = ["shared_empty"]

_MESSAGE_BYTES = 1024  # more than the texts in it can have: errors are cut to a hundred characters


def shared_empty(numel: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> Tensor:
    """A flat CPU tensor of `numel` zeros over which the collectives of `group` need no copies.

    A collective: every rank of the group calls it, with the same arguments.  Views count too, where they begin at the
    same offset on all ranks.  In a group in two levels the ranks of each host share it.  Where the group has none
    (one rank, Gloo or NCCL alone) it is an ordinary tensor.  The memory lives as long as the tensor or a view of it;
    what the other ranks have mapped of it, as long as theirs or until the group is closed.  A forked child shares it
    with its parent.

    Raises CollectiveFailed on every rank, naming both, if two ranks of the group, on whatever host, ask for different
    things; ValueError for a negative length.
    """
    if numel < 0:
        raise ValueError(f"shared_empty: numel is {numel}; it must be 0 or more.")
    found = None if group_size(group) == 1 else transport_of(group)
    if found is None:
        return torch.zeros(numel, dtype=dtype)
    try:
        _agree(found, dist.get_process_group_ranks(group), numel, dtype)
        return _made(found, numel, dtype) if numel else torch.zeros(0, dtype=dtype)
    except SharedMemoryFailed as error:
        raise CollectiveFailed(f"shared_empty({numel}, {dtype}) failed: {error}") from error


def _made(carrier: Carrier, numel: int, dtype: torch.dtype) -> Tensor:
    transport, nbytes = carrier.memory, numel * dtype.itemsize
    with transport.lock:
        number, transport.num_segments = transport.num_segments, transport.num_segments + 1
    segment, problem = None, ""
    try:
        segment = Segment.create(transport.library, nbytes, lambda: transport.drop_segment(number))
    except OSError as error:
        problem = str(error)[:100]
    offer = None if segment is None else attrs.asdict(segment.offer())
    try:
        said = _exchanged(carrier.issue_here, len(transport.ranks), {"offer": offer, "problem": problem})
        memories, problem = _mapped(transport, said, segment)
        problems = _exchanged(carrier.issue_here, len(transport.ranks), problem)
    finally:
        if segment is not None:
            segment.seal()
    if segment is None or any(problems):
        return torch.zeros(numel, dtype=dtype)
    transport.add_segment(number, nbytes, memories)
    return torch.frombuffer(segment.memory.buffer, dtype=dtype, count=numel)


def _agree(carrier: Carrier, ranks: Sequence[int], numel: int, dtype: torch.dtype) -> None:
    """Compare what all ranks of the group, which are `ranks` of the world, ask for."""
    said = _exchanged(carrier.issue, len(ranks), [numel, str(dtype)])
    for place, each in enumerate(said):
        if each != said[0]:
            raise SharedMemoryFailed(
                f"rank {ranks[0]} asks for {said[0][0]} of {said[0][1]}, "
                f"rank {ranks[place]} for {each[0]} of {each[1]}."
            )


def _mapped(transport: Transport, said: list[dict[str, Any]], own: Segment | None) -> tuple[list[Memory], str]:
    """The memory of all ranks, or what went wrong on one of them or here."""
    problem = next((each["problem"] for each in said if each["problem"]), "")
    if problem or own is None:
        return [], problem
    try:
        return [
            own.memory if place == transport.rank else Offer(**each["offer"]).accept(transport.library)
            for place, each in enumerate(said)
        ], ""
    except OSError as error:
        return [], str(error)[:100]


def _exchanged(issue: Callable[[Message], Step | None], size: int, value: Any) -> list[Any]:
    """The small JSON values of the `size` ranks that `issue` reaches, through the transport itself."""
    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    assert len(data) <= _MESSAGE_BYTES, f"{len(data)} bytes of JSON"
    mine = torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    output = torch.empty(size * _MESSAGE_BYTES, dtype=torch.uint8)
    step = issue(Message("all_gather", output, mine, label="shared_empty"))
    assert step is not None, "bytes are carried"
    step.wait()
    return [json.loads(bytes(row.tolist())) for row in output.view(-1, _MESSAGE_BYTES)]
