"""`deepspeed.comm`: the collectives, with DeepSpeed's arguments.

Sums, maxima and minima of dense tensors, flat gathers and scatters, broadcasts and barriers go through zcomm, so
that a trace, the comms logger and the diagnosis of a hang know of them; everything else is torch.distributed's.  What
torch returns for `async_op=True` has `wait()`, and so has what is returned here.
Objects travel as JSON and not as pickles, which would run whatever arrives: tuples come back as lists.

`prof`, `debug` and `log_name`, which DeepSpeed takes for its logger, are accepted everywhere and unused (but for the
`log_name` of `all_reduce`, which is the label); another keyword is refused with the name that was meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

import zcomm
from zengine.deepspeed.comm.keywords import takes_logging
from zengine.deepspeed.comm.world import get_all_ranks_from_group, get_rank, get_world_size

__all__ = [
    "all_gather",
    "all_gather_base",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "inference_all_reduce",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_base",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]

_WORDS = {ReduceOp.SUM: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}


@takes_logging
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    log_name: str = "",
) -> Any:
    """Replace `tensor` on every rank by the sum (or `op`) over the ranks; AVG works on every back end.

    Returns a handle with wait() for async_op, else None.
    """
    if op == ReduceOp.AVG:
        handle = _reduced(tensor, "sum", group, log_name)
        averaged = zcomm.after(handle, lambda: _divide(tensor, get_world_size(group)))
        return _done(averaged, async_op)
    if op in _WORDS:
        return _done(_reduced(tensor, _WORDS[op], group, log_name), async_op)
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """`all_reduce`."""
    return all_reduce(tensor, op, group, async_op)


@takes_logging
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_reduce` of several tensors of one dtype as one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    handle = all_reduce(flat, op, group, True, "coalesced")

    def scatter_back() -> None:
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    return _done(zcomm.after(handle, scatter_back), async_op)


@takes_logging
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """The sum over the ranks, on rank `dst` of the world."""
    return dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)


@takes_logging
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum `input_list[i]` over the ranks into rank i's `output`."""
    return dist.reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)


@takes_logging
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum `tensor` over the ranks and keep this rank's slice of it, along the first dim, in `output_tensor`."""
    if op in _WORDS and tensor.is_contiguous() and output_tensor.is_contiguous():
        source = tensor.reshape(-1).clone()  # zcomm leaves the other slices undefined
        return _done(
            zcomm.reduce_scatter(output_tensor.view(-1), source, group, op=_WORDS[op], async_op=True), async_op
        )
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


reduce_scatter_fn = reduce_scatter_base = reduce_scatter_tensor


@takes_logging
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Rank i's `tensor` into `tensor_list[i]`."""
    return dist.all_gather(list(tensor_list), tensor, group=group, async_op=async_op)


@takes_logging
def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's `tensor` into `output_tensor`, one after the other."""
    if tensor.is_contiguous() and output_tensor.is_contiguous():
        return _done(zcomm.all_gather(output_tensor.view(-1), tensor.view(-1), group, async_op=True), async_op)
    return dist.all_gather_into_tensor(output_tensor, tensor, group=group, async_op=async_op)


allgather_fn = all_gather_base = all_gather_into_tensor


@takes_logging
def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`all_gather_into_tensor` of several pairs of one dtype as one message."""
    size = get_world_size(group)
    mine = torch.cat([tensor.reshape(-1) for tensor in input_tensors])
    whole = mine.new_empty(size * mine.numel())
    handle = zcomm.all_gather(whole, mine, group, async_op=True, label="coalesced")

    def distribute() -> None:
        start = 0
        for output, tensor in zip(output_tensors, input_tensors):
            rows = whole.view(size, -1)[:, start : start + tensor.numel()]
            output.copy_(rows.reshape(output.shape))
            start += tensor.numel()

    return _done(zcomm.after(handle, distribute), async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Rank i's `obj`, as JSON, into `object_list[i]`.  TypeError on every rank for what JSON cannot hold."""
    object_list[:] = zcomm.all_gather_object(obj, group)


@takes_logging
def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Rank `src` (of the world)'s `tensor` on every rank."""
    if tensor.is_contiguous():
        source = get_all_ranks_from_group(group).index(src) if group is not None else src
        return _done(zcomm.broadcast(tensor, group, source=source, async_op=True), async_op)
    return dist.broadcast(tensor, src=src, group=group, async_op=async_op)


def broadcast_object_list(
    object_list: list[Any], src: int, group: ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Rank `src` (of the world)'s objects, as JSON, in every rank's list.  TypeError for what JSON cannot hold."""
    is_sender = get_rank() == src
    everyone = zcomm.all_gather_object(object_list if is_sender else None, group)
    object_list[:] = everyone[get_all_ranks_from_group(group).index(src)]


@takes_logging
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Slice r of `tensor` to rank r, and what rank r sends into slice r of `output`."""
    received = None if output_split_sizes is None else list(output_split_sizes)
    sent = None if input_split_sizes is None else list(input_split_sizes)
    return dist.all_to_all_single(output, tensor, received, sent, group=group, async_op=async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`input_tensor_list[r]` to rank r; equal sizes on every back end, other sizes where it knows all_to_all."""
    if len({tensor.shape for tensor in (*output_tensor_list, *input_tensor_list)}) != 1:
        return dist.all_to_all(list(output_tensor_list), list(input_tensor_list), group=group, async_op=async_op)
    sent = torch.stack(list(input_tensor_list)).view(-1)
    received = torch.empty_like(sent)
    handle = zcomm.all_to_all(received, sent, group, async_op=True)

    def distribute() -> None:
        for output, part in zip(output_tensor_list, received.chunk(len(output_tensor_list))):
            output.copy_(part.view_as(output))

    return _done(zcomm.after(handle, distribute), async_op)


@takes_logging
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Every rank's `tensor` in `gather_list` of rank `dst`."""
    return dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


@takes_logging
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """`scatter_list[r]` of rank `src` into rank r's `tensor`."""
    return dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


@takes_logging
def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`; returns when it may be reused."""
    dist.send(tensor, dst, group=group, tag=tag)


@takes_logging
def recv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive into `tensor`; returns the sender's rank."""
    return int(dist.recv(tensor, src, group=group, tag=tag))


@takes_logging
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Send in the background."""
    return dist.isend(tensor, dst, group=group, tag=tag)


@takes_logging
def irecv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Receive in the background."""
    return dist.irecv(tensor, src, group=group, tag=tag)


@takes_logging
def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> None:
    """Return when every rank has come here.  An asynchronous one is refused: nothing could wait for it."""
    if async_op:
        raise ValueError("barrier(async_op=True) is not available: a barrier that nobody waits for is none.")
    zcomm.barrier(group)


@takes_logging
def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """A barrier that names the rank that did not come: over Gloo torch's, elsewhere zcomm's, whose errors do so."""
    if get_world_size(group) > 1 and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
    elif get_rank(group) >= 0:
        zcomm.barrier(group, label="monitored_barrier")


def _reduced(tensor: Tensor, op: str, group: ProcessGroup | None, label: str) -> zcomm.Handle:
    """Of a tensor of any strides: torch's own gives wrong numbers for one that is not dense."""
    dense = tensor.contiguous()
    handle = zcomm.all_reduce(dense, group, op=op, async_op=True, label=label)
    return handle if dense is tensor else zcomm.after(handle, lambda: _write(tensor, dense))


def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _divide(tensor: Tensor, size: int) -> None:
    tensor.div_(size)


def _done(handle: zcomm.Handle, async_op: bool) -> zcomm.Handle | None:
    """The handle, or None once it has been waited for."""
    if async_op:
        return handle
    handle.wait()
    return None
