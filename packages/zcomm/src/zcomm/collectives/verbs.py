"""Flat collectives of data parallelism, with one interface.

Every collective works in place or into a given tensor, takes an optional `group` and `label`, and returns a `Handle`.
At world size 1 it issues and traces nothing and only copies.  A synchronous call is the asynchronous one plus its
wait; there is no second path.

A label names one call in errors and traces.  It must be equal on all ranks, as size and dtype are.  Inside a host
that shares memory, and everywhere with ZCOMM_VERIFY=1, ranks with different labels raise, so a collective that one
rank skipped is found before its data mixes with that of the next.

`group=None` is the default group if torch.distributed is initialized, else a world of one, so a script without a
launcher runs the same code.

CPU tensors travel through shared memory between ranks of a host (`zcomm.shared`), everything else through Gloo or
NCCL; `registry.issue` returns None where shared memory is not available.

Rejected: averaging as an op.  Gloo has none, and a mean over ranks times a mean over micro-steps is one scalar that
the caller already multiplies by.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import compat, gloo
from zcomm.collectives import checks
from zcomm.collectives.handles import DONE, Handle, start
from zcomm.hangs.fingerprint import Call, call_name
from zcomm.shared import registry
from zcomm.shared.transport import Message

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "group_rank",
    "group_size",
    "reduce_scatter",
    "runs_in_order",
]

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def group_size(group: ProcessGroup | None = None) -> int:
    """Number of ranks in `group`; 1 if torch.distributed is not initialized and no group is given.

    Raises ValueError if this process is not a member of `group`.
    """
    if group is None and not dist.is_initialized():
        return 1
    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError(
            f"Rank {dist.get_rank()} is not a member of the given group. "
            "Only members may communicate over it; take the group from axis_group(mesh, axis)."
        )
    return size


def group_rank(group: ProcessGroup | None = None) -> int:
    """Rank of this process in `group`; 0 if torch.distributed is not initialized."""
    return dist.get_rank(group) if group_size(group) > 1 else 0


def all_reduce(
    tensor: Tensor, group: ProcessGroup | None = None, *, op: str = "sum", async_op: bool = False, label: str = ""
) -> Handle:
    """Replace `tensor` on every rank by its sum (or "max", "min") over the ranks.

    tensor: contiguous, any shape, same shape and dtype on every rank; written in place.
    Raises ValueError naming the call for an unknown op or a tensor that cannot be reduced in place.

    >>> import torch, zcomm
    >>> world, loss = zcomm.init(device="cpu"), torch.tensor([3.0])
    >>> _ = zcomm.all_reduce(loss, label="loss")
    >>> loss / zcomm.group_size()
    tensor([3.])
    >>> world.close()
    """
    reduction = _reduction("all_reduce", label, op)
    checks.dense("all_reduce", label, "tensor", tensor)
    size = group_size(group)
    if size == 1:
        return DONE
    message = Message("all_reduce", tensor, tensor, op, label=label, overlap=async_op)
    return start(
        Call.of("all_reduce", label, size, tensor),
        lambda: registry.issue(group, message) or dist.all_reduce(tensor, op=reduction, group=group, async_op=True),
        (tensor,),
        async_op=async_op,
        group=group,
        detail=reduction,
    )


def reduce_scatter(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None = None,
    *,
    op: str = "sum",
    async_op: bool = False,
    label: str = "",
) -> Handle:
    """Reduce `input` over the ranks and write slice number `group_rank()` of the result to `output`.

    input: (size * n,) contiguous; output: (n,) contiguous, same dtype and device, or this rank's slice of input.
    If the two share memory, the other slices of `input` are undefined afterwards.
    Raises ValueError naming the call if the tensors do not match.

    >>> import torch, zcomm
    >>> world, gradient = zcomm.init(device="cpu"), torch.arange(4.0)
    >>> shard = torch.empty(4 // zcomm.group_size())
    >>> handle = zcomm.reduce_scatter(shard, gradient, async_op=True, label="bucket[0]")
    >>> handle.wait()
    >>> shard
    tensor([0., 1., 2., 3.])
    >>> world.close()
    """
    reduction = _reduction("reduce_scatter", label, op)
    size, rank = group_size(group), group_rank(group)
    checks.flat_pair("reduce_scatter", label, output, input, size=size, rank=rank)
    if size == 1:
        return _copy(output, input)
    message = Message("reduce_scatter", output, input, op, label=label, overlap=async_op)
    is_in_place = output.data_ptr() == input[rank * output.numel() :].data_ptr()
    return start(
        Call.of("reduce_scatter", label, size, input),
        lambda: (
            registry.issue(group, message)
            or (gloo.is_used(input, group) and is_in_place and _all_reduce_in_place(input, reduction, group))
            or compat.reduce_scatter_flat(output, input, op=reduction, group=group, async_op=True)
        ),
        (output, input),
        async_op=async_op,
        group=group,
        detail=reduction,
    )


def all_gather(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None = None,
    *,
    async_op: bool = False,
    label: str = "",
    agreed: bool = False,
) -> Handle:
    """Write every rank's `input` into `output`, in the order of the ranks.

    input: (n,) contiguous; output: (size * n,) contiguous, same dtype and device; input may be this rank's slice of
    output.  Raises ValueError naming the call if the tensors do not match.

    agreed: over Gloo, compare the call with those of the other ranks first, in a small message.  Gloo ends the
        process if another rank sends more than expected, and mixes up messages of equal size.  Shared memory
        compares every call.

    >>> import torch, zcomm
    >>> world, shard = zcomm.init(device="cpu"), torch.tensor([1.0, 2.0])
    >>> whole = torch.empty(2 * zcomm.group_size())
    >>> _ = zcomm.all_gather(whole, shard)
    >>> whole
    tensor([1., 2.])
    >>> world.close()
    """
    size, rank = group_size(group), group_rank(group)
    checks.flat_pair("all_gather", label, output, input, size=size, rank=rank)
    if size == 1:
        return _copy(output, input)
    message = Message("all_gather", output, input, label=label, overlap=async_op)
    return start(
        Call.of("all_gather", label, size, output),
        lambda: (
            registry.issue(group, message)
            or (gloo.is_used(output, group) and _gather_over_gloo(output, input, group, label if agreed else ""))
            or compat.all_gather_flat(output, input, group=group, async_op=True)
        ),
        (output, input),
        async_op=async_op,
        group=group,
    )


def broadcast(
    tensor: Tensor, group: ProcessGroup | None = None, *, source: int = 0, async_op: bool = False, label: str = ""
) -> Handle:
    """Replace `tensor` on every rank by that of rank `source` of the group (not of the world).

    tensor: contiguous, any shape, same shape and dtype on every rank; written in place.
    Raises ValueError naming the call if there is no such rank.

    >>> import torch, zcomm
    >>> world, weight = zcomm.init(device="cpu"), torch.ones(2)
    >>> _ = zcomm.broadcast(weight, source=0)
    >>> world.close()
    """
    checks.dense("broadcast", label, "tensor", tensor)
    size = group_size(group)
    if not 0 <= source < size:
        raise ValueError(
            f"{call_name('broadcast', label)}: source {source} is not a rank of the group; allowed: 0 to {size - 1}."
        )
    if size == 1:
        return DONE
    sender = source if group is None else dist.get_global_rank(group, source)
    message = Message("broadcast", tensor, tensor, source=source, label=label, overlap=async_op)
    return start(
        Call.of("broadcast", label, size, tensor),
        lambda: registry.issue(group, message) or dist.broadcast(tensor, src=sender, group=group, async_op=True),
        (tensor,),
        async_op=async_op,
        group=group,
        detail=sender,
    )


def all_to_all(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None, *, async_op: bool = False, label: str = ""
) -> Handle:
    """Send slice r of `input` to rank r, and receive slice r of `output` from rank r.

    output, input: (size * n,) contiguous, same dtype and device, without overlap.
    Raises ValueError naming the call if the tensors do not match or do not divide into slices.
    """
    size = group_size(group)
    checks.all_to_all_pair("all_to_all", label, output, input, size=size)
    if size == 1:
        return _copy(output, input)
    message = Message("all_to_all", output, input, label=label, overlap=async_op)
    return start(
        Call.of("all_to_all", label, size, input),
        lambda: registry.issue(group, message) or dist.all_to_all_single(output, input, group=group, async_op=True),
        (output, input),
        async_op=async_op,
        group=group,
    )


def barrier(group: ProcessGroup | None = None, *, label: str = "") -> None:
    """Return when every rank of the group has called.  Raises CollectiveFailed if one does not."""
    size = group_size(group)
    if size == 1:
        return
    device = group_device(group)
    device_ids = [device.index] if device.type == "cuda" else None
    start(
        Call("barrier", label, size),
        lambda: (
            registry.issue(group, Message("barrier", None, None, label=label))
            or dist.barrier(group=group, async_op=True, device_ids=device_ids)
        ),
        (),
        async_op=False,
        group=group,
    )


def group_device(group: ProcessGroup | None = None) -> torch.device:
    """Device of tensors that travel over `group`: the current GPU for NCCL, else the CPU."""
    backend = dist.get_backend(group) if dist.is_initialized() else "gloo"
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def runs_in_order(device: torch.device, group: ProcessGroup | None = None) -> bool:
    """True if messages of `device` wait in a queue for those launched before them: NCCL, or a played world.

    False where each is carried by itself: over Gloo, which needs no handshake if a receive is posted early.
    """
    return device.type != "cpu" or (dist.is_initialized() and compat.backend_of(group) == compat.PLAYED)


def _reduction(call: str, label: str, op: str) -> dist.ReduceOp.RedOpType:
    if op not in _OPS:
        raise ValueError(f"{call_name(call, label)}: unknown op {op!r}; allowed: {', '.join(map(repr, _OPS))}.")
    return _OPS[op]


def _all_reduce_in_place(input: Tensor, reduction: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> Any:
    """Reduce-scatter in place over Gloo: see zcomm/gloo.py."""
    return dist.all_reduce(input, op=reduction, group=group, async_op=True)


def _gather_over_gloo(output: Tensor, input: Tensor, group: ProcessGroup | None, label: str) -> Any:
    """Gather over Gloo: see zcomm/gloo.py.  label: compared with those of the other ranks first; "" is not."""
    size, rank = group_size(group), group_rank(group)
    if label:
        gloo.compare_calls(
            f"all_gather {label!r} of {input.numel()} {input.dtype} a rank", group, size=size, rank=rank
        )
    return gloo.all_gather(output.detach(), input.detach(), group, size=size, rank=rank)


def _copy(output: Tensor, input: Tensor) -> Handle:
    """Gather or scatter at world size 1."""
    if output.data_ptr() != input.data_ptr():
        with torch.no_grad():
            output.copy_(input)
    return DONE
