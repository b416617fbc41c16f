"""Shared tensors: CPU tensors whose memory all ranks of a group have mapped.

A collective copies ordinary tensors through staging buffers; over shared tensors it works in place, in the memory of
all ranks.  Making one is a collective: each rank offers a segment through the group's transport and maps those of the
others.  Either every rank gets shared memory or all get ordinary memory.
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

from zcomm.collectives.handles import CollectiveFailed
from zcomm.collectives.verbs import group_size
from zcomm.shared.registry import GroupTransport, transport_of
from zcomm.shared.segment import Memory, Offer, Segment
from zcomm.shared.task_queue import Step
from zcomm.shared.transport import Message, SharedMemoryFailed, Transport

__all__ = ["shared_empty"]

_MESSAGE_BYTES = 1024  # enough: errors are cut to a hundred characters


def shared_empty(numel: int, dtype: torch.dtype = torch.float32, group: ProcessGroup | None = None) -> Tensor:
    """Allocate a flat CPU tensor of `numel` zeros over which the collectives of `group` need no copies.

    A collective: every rank of the group calls it, with the same arguments.  Views work too, if they begin at the
    same offset on all ranks.  In a two-level group the ranks of each host share the tensor.  Without shared memory
    (one rank in all or on each host, Gloo or NCCL alone) it is an ordinary tensor.  The memory lives as long as the
    tensor or a view of it; the mappings of the other ranks live as long as their tensors or until the group is
    closed.  A forked child shares it with its parent.

    Raises CollectiveFailed on every rank, naming both, if two ranks of the group pass different arguments; ValueError
    for a negative length.
    """
    if numel < 0:
        raise ValueError(f"shared_empty: numel is {numel}; it must be 0 or more.")
    found = None if group_size(group) == 1 else transport_of(group)
    if found is None:
        return torch.zeros(numel, dtype=dtype)
    try:
        _check_arguments(found, dist.get_process_group_ranks(group), numel, dtype)
        is_alone = len(found.memory.ranks) == 1
        return _allocate(found, numel, dtype) if numel and not is_alone else torch.zeros(numel, dtype=dtype)
    except SharedMemoryFailed as error:
        raise CollectiveFailed(f"shared_empty({numel}, {dtype}) failed: {error}") from error


def _allocate(group_transport: GroupTransport, numel: int, dtype: torch.dtype) -> Tensor:
    transport, nbytes = group_transport.memory, numel * dtype.itemsize
    with transport.lock:
        number, transport.num_segments = transport.num_segments, transport.num_segments + 1
    issue, problem = group_transport.issue_on_host, ""
    segment: Segment | None = None
    try:
        segment = Segment.create(transport.library, nbytes, lambda: transport.drop_segment(number))
    except OSError as error:
        problem = str(error)[:100]
    offer = None if segment is None else attrs.asdict(segment.offer())
    try:
        offers = _all_gather_json(issue, len(transport.ranks), {"offer": offer, "problem": problem})
        memories, problem = _map_all(transport, offers, segment)
        problems = _all_gather_json(issue, len(transport.ranks), problem)
    finally:
        if segment is not None:
            segment.seal()
    if segment is None or any(problems):
        return torch.zeros(numel, dtype=dtype)
    transport.add_segment(number, nbytes, memories)
    return torch.frombuffer(segment.memory.buffer, dtype=dtype, count=numel)


def _check_arguments(transport: GroupTransport, ranks: Sequence[int], numel: int, dtype: torch.dtype) -> None:
    """Compare the arguments of all ranks of the group; `ranks` are their global ranks."""
    given = _all_gather_json(transport.issue, len(ranks), [numel, str(dtype)])
    for place, each in enumerate(given):
        if each != given[0]:
            raise SharedMemoryFailed(
                f"rank {ranks[0]} asks for {given[0][0]} of {given[0][1]}, "
                f"rank {ranks[place]} for {each[0]} of {each[1]}."
            )


def _map_all(transport: Transport, offers: list[dict[str, Any]], own: Segment | None) -> tuple[list[Memory], str]:
    """Map the memory of all ranks; return it, or the problem of one of them."""
    problem = next((each["problem"] for each in offers if each["problem"]), "")
    if problem or own is None:
        return [], problem
    try:
        return [
            own.memory if place == transport.rank else Offer(**each["offer"]).accept(transport.library)
            for place, each in enumerate(offers)
        ], ""
    except OSError as error:
        return [], str(error)[:100]


def _all_gather_json(issue: Callable[[Message], Step | None], size: int, value: Any) -> list[Any]:
    """Gather small JSON values from the `size` ranks that `issue` reaches, through the transport itself."""
    data = json.dumps(value, ensure_ascii=False).encode(errors="replace")
    assert len(data) <= _MESSAGE_BYTES, f"{len(data)} bytes of JSON"
    mine = torch.frombuffer(bytearray(data.ljust(_MESSAGE_BYTES)), dtype=torch.uint8)
    output = torch.empty(size * _MESSAGE_BYTES, dtype=torch.uint8)
    step = issue(Message("all_gather", output, mine, label="shared_empty"))
    assert step is not None, "bytes are supported"
    step.wait()
    return [json.loads(bytes(row.tolist())) for row in output.view(-1, _MESSAGE_BYTES)]
