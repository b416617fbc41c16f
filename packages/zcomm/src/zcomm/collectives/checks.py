"""Argument checks of flat collectives, made before the back end is called.

Gloo and NCCL answer a wrong length with "connection reset by peer" on *another* rank, or with a wrong sum.  Every
check here is local, costs about a microsecond, and runs at world size 1 too, so a mistake shows on a laptop.
Agreement *between* ranks is not checked here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zcomm.hangs.fingerprint import call_name


def dense(op: str, label: str, role: str, tensor: object) -> None:
    """Raise unless `tensor` is a contiguous, strided tensor of any shape."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{call_name(op, label)}: {role} must be a torch.Tensor, got {type(tensor).__name__}.")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{call_name(op, label)}: {role} is {tensor.layout}; pass a dense tensor (.to_dense()).")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{call_name(op, label)}: {role} of shape {list(tensor.shape)} and strides {list(tensor.stride())} "
            "is not contiguous; pass a contiguous tensor, because the result is written into it in place."
        )


def flat_pair(op: str, label: str, output: Tensor, input: Tensor, *, size: int, rank: int) -> None:
    """Raise unless one of two flat tensors is `size` times the other, as `op` requires, and they match.

    output, input: 1-D contiguous tensors of one dtype and device.  The smaller may be slice number `rank` of the
    larger; any other overlap would be written while it is read.
    """
    _alike(op, label, output, input)
    small, large = (output, input) if op.startswith("reduce_scatter") else (input, output)
    if large.numel() != small.numel() * size:
        small_role, large_role = ("output", "input") if small is output else ("input", "output")
        raise ValueError(
            f"{call_name(op, label)}: {large_role} has {large.numel()} elements, {small_role} has {small.numel()}; "
            f"over {size} ranks {large_role} must have {small.numel()} x {size} = {small.numel() * size} elements."
        )
    _own_slice_or_apart(op, label, small, large, rank)


def all_to_all_pair(op: str, label: str, output: Tensor, input: Tensor, *, size: int) -> None:
    """Raise unless two flat tensors of one length, dtype and device divide into `size` slices and do not overlap."""
    _alike(op, label, output, input)
    if output.numel() != input.numel() or input.numel() % size:
        raise ValueError(
            f"{call_name(op, label)}: output has {output.numel()} elements, input has {input.numel()}; both must "
            f"have the same number, a multiple of {size}: one slice a rank."
        )
    offset_bytes = output.data_ptr() - input.data_ptr()
    if input.numel() and abs(offset_bytes) < input.nbytes:
        raise ValueError(
            f"{call_name(op, label)}: output overlaps input at byte {offset_bytes}; pass memory of its own."
        )


def _alike(op: str, label: str, output: Tensor, input: Tensor) -> None:
    """Raise unless both are flat, contiguous, and of one dtype and device."""
    for role, tensor in (("output", output), ("input", input)):
        dense(op, label, role, tensor)
        if tensor.dim() != 1:
            raise ValueError(
                f"{call_name(op, label)}: {role} must be 1-D, got shape {list(tensor.shape)}; flatten it."
            )
    for what in ("dtype", "device"):
        given = (getattr(output, what), getattr(input, what))
        if given[0] != given[1]:
            raise ValueError(
                f"{call_name(op, label)}: output has {what} {given[0]}, input {given[1]}; they must agree."
            )


def _own_slice_or_apart(op: str, label: str, small: Tensor, large: Tensor, rank: int) -> None:
    offset_bytes = small.data_ptr() - large.data_ptr()
    apart = offset_bytes >= large.nbytes or offset_bytes + small.nbytes <= 0
    if not apart and offset_bytes != rank * small.nbytes:
        raise ValueError(
            f"{call_name(op, label)}: the smaller tensor overlaps the larger at byte {offset_bytes}; only slice "
            f"{rank} (this rank's own, at byte {rank * small.nbytes}) may share its memory."
        )
