"""`deepspeed.comm`: the collectives, with DeepSpeed's arguments.

Sums, maxima and minima of dense tensors, flat gathers and scatters, broadcasts and barriers go through zcomm, so
that traces, the comms logger and the hang detector see them; the rest is torch.distributed's.  With `async_op=True`
the result has `wait()`, as torch's does.  Objects are sent as JSON, not as pickles, which could execute code: tuples
come back as lists.

`prof`, `debug` and `log_name`, for DeepSpeed's logger, are accepted everywhere and ignored (except the `log_name` of
`all_reduce`, which becomes the label); another unknown keyword raises TypeError with the nearest known one.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

import zcomm
from zengine.deepspeed.comm.keywords import accept_logging_keywords
from zengine.deepspeed.comm.summary import timed_op
from zengine.deepspeed.comm.world import get_all_ranks_from_group, get_rank, get_world_size

__all__ = [
    "P2POp",
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
    "batch_isend_irecv",
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

_OPS = {ReduceOp.SUM: "sum", ReduceOp.MAX: "max", ReduceOp.MIN: "min"}


@accept_logging_keywords
def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    log_name: str = "",
) -> Any:
    """Replace `tensor` on every rank by the sum (or `op`) over the ranks; AVG works on every backend.

    Returns a handle with wait() for async_op, else None.
    """
    if op == ReduceOp.AVG:
        handle = _all_reduce_dense(tensor, "sum", group, log_name)
        averaged = zcomm.after(handle, lambda: _divide(tensor, get_world_size(group)))
        return _finish(averaged, async_op)
    if op in _OPS:
        return _finish(_all_reduce_dense(tensor, _OPS[op], group, log_name), async_op)
    zcomm.launching("all_reduce", group)
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


@accept_logging_keywords
def inference_all_reduce(
    tensor: Tensor, op: Any = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Any:
    """Call `all_reduce`."""
    return all_reduce(tensor, op, group, async_op, "inference_all_reduce")


@accept_logging_keywords
def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """All-reduce several tensors of one dtype in one message."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    handle = all_reduce(flat, op, group, True, "all_reduce_coalesced")

    def scatter_back() -> None:
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors])):
            tensor.copy_(part.view_as(tensor))

    return _finish(zcomm.after(handle, scatter_back), async_op)


@timed_op
@accept_logging_keywords
def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Reduce to rank `dst` of the world."""
    zcomm.launching("reduce", group)
    return dist.reduce(tensor, dst=dst, op=op, group=group, async_op=async_op)


@timed_op
@accept_logging_keywords
def reduce_scatter(
    output: Tensor,
    input_list: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum `input_list[i]` over the ranks into rank i's `output`."""
    zcomm.launching("reduce_scatter", group)
    return dist.reduce_scatter(output, list(input_list), op=op, group=group, async_op=async_op)


@accept_logging_keywords
def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Sum `tensor` (ranks * n, ...) over the ranks; `output_tensor` (n, ...) receives this rank's slice."""
    if op in _OPS and tensor.is_contiguous() and output_tensor.is_contiguous():
        source = tensor.reshape(-1).clone()  # zcomm leaves the other slices undefined
        return _finish(
            zcomm.reduce_scatter(
                output_tensor.view(-1), source, group, op=_OPS[op], async_op=True, label="reduce_scatter_tensor"
            ),
            async_op,
        )
    zcomm.launching("reduce_scatter_tensor", group)
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


reduce_scatter_fn = reduce_scatter_base = reduce_scatter_tensor


@timed_op
@accept_logging_keywords
def all_gather(
    tensor_list: Sequence[Tensor],
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather rank i's `tensor` into `tensor_list[i]`."""
    zcomm.launching("all_gather", group)
    return dist.all_gather(list(tensor_list), tensor, group=group, async_op=async_op)


@accept_logging_keywords
def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's `tensor` (n, ...) into `output_tensor` (ranks * n, ...), in rank order."""
    if tensor.is_contiguous() and output_tensor.is_contiguous():
        handle = zcomm.all_gather(
            output_tensor.view(-1), tensor.view(-1), group, async_op=True, label="all_gather_into_tensor"
        )
        return _finish(handle, async_op)
    zcomm.launching("all_gather_into_tensor", group)
    return dist.all_gather_into_tensor(output_tensor, tensor, group=group, async_op=async_op)


allgather_fn = all_gather_base = all_gather_into_tensor


@accept_logging_keywords
def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather several (output, input) pairs of one dtype in one message; see `all_gather_into_tensor`."""
    size = get_world_size(group)
    mine = torch.cat([tensor.reshape(-1) for tensor in input_tensors])
    whole = mine.new_empty(size * mine.numel())
    handle = zcomm.all_gather(whole, mine, group, async_op=True, label="all_gather_coalesced")

    def distribute() -> None:
        start = 0
        for output, tensor in zip(output_tensors, input_tensors):
            rows = whole.view(size, -1)[:, start : start + tensor.numel()]
            output.copy_(rows.reshape(output.shape))
            start += tensor.numel()

    return _finish(zcomm.after(handle, distribute), async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: ProcessGroup | None = None) -> None:
    """Gather rank i's `obj`, as JSON, into `object_list[i]`.  Raises TypeError if JSON cannot hold it."""
    object_list[:] = zcomm.all_gather_object(obj, group)


@accept_logging_keywords
def broadcast(tensor: Tensor, src: int, group: ProcessGroup | None = None, async_op: bool = False) -> Any:
    """Broadcast `tensor` from rank `src` of the world."""
    if tensor.is_contiguous():
        source = get_all_ranks_from_group(group).index(src) if group is not None else src
        return _finish(zcomm.broadcast(tensor, group, source=source, async_op=True), async_op)
    zcomm.launching("broadcast", group)
    return dist.broadcast(tensor, src=src, group=group, async_op=async_op)


def broadcast_object_list(
    object_list: list[Any], src: int, group: ProcessGroup | None = None, device: torch.device | None = None
) -> None:
    """Broadcast the objects of rank `src` of the world, as JSON.  Raises TypeError if JSON cannot hold them."""
    is_sender = get_rank() == src
    everyone = zcomm.all_gather_object(object_list if is_sender else None, group)
    object_list[:] = everyone[get_all_ranks_from_group(group).index(src)]


@timed_op
@accept_logging_keywords
def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send slice r (of the first dim) of `tensor` to rank r; slice r of `output` comes from rank r."""
    received = None if output_split_sizes is None else list(output_split_sizes)
    sent = None if input_split_sizes is None else list(input_split_sizes)
    zcomm.launching("all_to_all_single", group)
    return dist.all_to_all_single(output, tensor, received, sent, group=group, async_op=async_op)


def all_to_all(
    output_tensor_list: Sequence[Tensor],
    input_tensor_list: Sequence[Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Send `input_tensor_list[r]` to rank r.

    Equal sizes work on every backend, other sizes on backends with all_to_all.
    """
    if len({tensor.shape for tensor in (*output_tensor_list, *input_tensor_list)}) != 1:
        zcomm.launching("all_to_all", group)
        return dist.all_to_all(list(output_tensor_list), list(input_tensor_list), group=group, async_op=async_op)
    sent = torch.stack(list(input_tensor_list)).view(-1)
    received = torch.empty_like(sent)
    handle = zcomm.all_to_all(received, sent, group, async_op=True)

    def distribute() -> None:
        for output, part in zip(output_tensor_list, received.chunk(len(output_tensor_list))):
            output.copy_(part.view_as(output))

    return _finish(zcomm.after(handle, distribute), async_op)


@timed_op
@accept_logging_keywords
def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Gather every rank's `tensor` into `gather_list` of rank `dst`."""
    zcomm.launching("gather", group)
    return dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


@timed_op
@accept_logging_keywords
def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    """Scatter `scatter_list[r]` of rank `src` into rank r's `tensor`."""
    zcomm.launching("scatter", group)
    return dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


@timed_op
@accept_logging_keywords
def send(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
    """Send `tensor` to rank `dst`; return when it may be reused."""
    dist.send(tensor, dst, group=group, tag=tag)


@timed_op
@accept_logging_keywords
def recv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> int:
    """Receive into `tensor`; return the sender's rank."""
    return int(dist.recv(tensor, src, group=group, tag=tag))


@timed_op
@accept_logging_keywords
def isend(tensor: Tensor, dst: int, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Send asynchronously; return a handle."""
    return dist.isend(tensor, dst, group=group, tag=tag)


@timed_op
@accept_logging_keywords
def irecv(tensor: Tensor, src: int | None = None, group: ProcessGroup | None = None, tag: int = 0) -> Any:
    """Receive asynchronously; return a handle."""
    return dist.irecv(tensor, src, group=group, tag=tag)


@final
class P2POp:
    """One of the operations of `batch_isend_irecv`: `isend` or `irecv`, a tensor, and the other rank of the world."""

    def __init__(self, op: Any, tensor: Tensor, peer: int, group: ProcessGroup | None = None, tag: int = 0) -> None:
        assert op in (isend, irecv), "op must be deepspeed.comm.isend or deepspeed.comm.irecv"
        self.op = "isend" if op is isend else "irecv"
        self.tensor, self.peer, self.group, self.tag = tensor, peer, group, tag


@timed_op
@accept_logging_keywords
def batch_isend_irecv(p2p_op_list: Sequence[P2POp]) -> list[Any]:
    """Start all of them as one batch; return their handles."""
    torchs = {"isend": dist.isend, "irecv": dist.irecv}
    batch = [dist.P2POp(torchs[each.op], each.tensor, each.peer, each.group, each.tag) for each in p2p_op_list]
    return list(dist.batch_isend_irecv(batch))


@accept_logging_keywords
def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: Any = None) -> Any:
    """Wait until every rank of `group` calls; for async_op return a handle whose wait() does.

    device_ids: of torch's barrier, which runs for async_op; otherwise ignored.
    """
    if async_op:
        return dist.barrier(group, async_op=True, device_ids=device_ids)
    return zcomm.barrier(group)


@accept_logging_keywords
def monitored_barrier(
    group: ProcessGroup | None = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Wait until every rank calls; an error names the missing rank.  torch's on Gloo, otherwise zcomm's."""
    if get_world_size(group) > 1 and dist.get_backend(group) == "gloo":
        dist.monitored_barrier(group=group, timeout=timeout, wait_all_ranks=wait_all_ranks)
    elif get_rank(group) >= 0:
        zcomm.barrier(group, label="monitored_barrier")


def _all_reduce_dense(tensor: Tensor, op: str, group: ProcessGroup | None, label: str) -> zcomm.Handle:
    """All-reduce a tensor of any strides; torch's all_reduce gives wrong values unless it is dense."""
    dense = tensor.contiguous()
    handle = zcomm.all_reduce(dense, group, op=op, async_op=True, label=label)
    return handle if dense is tensor else zcomm.after(handle, lambda: _write(tensor, dense))


def _write(tensor: Tensor, value: Tensor) -> None:
    tensor.copy_(value)


def _divide(tensor: Tensor, size: int) -> None:
    tensor.div_(size)


def _finish(handle: zcomm.Handle, async_op: bool) -> zcomm.Handle | None:
    """Return the handle if `async_op`; otherwise wait and return None."""
    if async_op:
        return handle
    handle.wait()
    return None
