"""Quantized collectives: gather and reduce-scatter in 8 or 4 bits (ZeRO++: Wang et al. 2023, arXiv 2306.10209).

A gather sends a message that its caller has encoded (`BlockCode`), so that weights are encoded once per version and
not once per gather, and decodes the received ones; the sender decodes its own part too, so all ranks see equal
values.

A reduction cannot run on codes as a ring would: each hop would decode, add and encode again, with an error that grows
with the number of ranks.  Here every rank encodes the part of each receiver, one all_to_all sends all parts, and the
receiver sums the decoded parts in float32, in the order of the ranks: each element is encoded once.  A rank's own
part stays exact.  Over several hosts the all_to_all takes two hops, inside a host and then between ranks of equal
index in their hosts.  A rank then sends its share of the host's sum over the slow network instead of its own addend
to every part: fewer bytes by the number of ranks per host, for elements that are encoded twice.

Both are deterministic: no atomic addition, and no order that depends on time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

import attrs
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm.collectives import checks
from zcomm.collectives.block_codes import BlockCode
from zcomm.collectives.error_feedback import ErrorFeedback
from zcomm.collectives.handles import DONE, Handle, after
from zcomm.collectives.verbs import all_gather, all_to_all, group_rank, group_size
from zcomm.hangs.fingerprint import call_name

__all__ = ["all_gather_quantized", "reduce_scatter_quantized"]

INT4 = BlockCode(bits=4)
INT8 = BlockCode(bits=8)


def all_gather_quantized(
    output: Tensor,
    message: Tensor,
    group: ProcessGroup | None = None,
    *,
    code: BlockCode = INT8,
    received: Tensor | None = None,
    async_op: bool = False,
    label: str = "",
) -> Handle:
    """Decode every rank's `message` into `output`, in the order of the ranks; the wait decodes.

    message: (code.num_bytes(n),) uint8, from `code.encode` of this rank's n elements.
    output: (size * n,) contiguous, of a floating-point dtype; every rank, including the sender, gets decoded values.
    received: (size * message.numel(),) uint8, 4-byte aligned: an optional buffer to receive into.
    Each element is within `code.relative_error` of its block's largest magnitude.
    Raises ValueError naming the call if the tensors do not match.
    """
    size = group_size(group)
    checks.dense("all_gather_quantized", label, "output", output)
    _check_slices("all_gather_quantized", label, output, size)
    numel = output.numel() // size
    if message.numel() != code.num_bytes(numel) or message.dtype is not torch.uint8:
        raise ValueError(
            f"{call_name('all_gather_quantized', label)}: message has {message.numel()} elements of {message.dtype}; "
            f"{numel} elements in {code.bits} bits are {code.num_bytes(numel)} of torch.uint8, made by code.encode."
        )
    all_codes = message.new_empty(size * message.numel()) if received is None else received
    _check_received(label, all_codes, size * message.numel())
    handle = all_gather(all_codes, message, group, async_op=async_op, label=label)

    def finish() -> None:
        code.decode(all_codes.view(size, -1), output.detach().view(size, -1))

    return _with_finish(handle, finish, async_op=async_op)


def reduce_scatter_quantized(
    output: Tensor,
    input: Tensor,
    group: ProcessGroup | None = None,
    *,
    groups: tuple[ProcessGroup | None, ProcessGroup | None] | None = None,
    code: BlockCode = INT4,
    feedback: ErrorFeedback | None = None,
    async_op: bool = False,
    label: str = "",
) -> Handle:
    """Sum `input` over the ranks, sent in `code`, and write slice number `group_rank()` of it to `output`.

    input: (size * n,) contiguous, of a floating-point dtype; it may be changed once this returns.
    output: (n,) contiguous, same dtype and device, or this rank's slice of input.
    groups: (inside a host, between hosts) for two hops, instead of `group`.  The second group holds the ranks of
        equal index in their hosts; slices go to rank `host * ranks of a host + index in the host`.
    feedback: adds what the code lost in this rank's last messages; one object for each repeated reduction.
    Another rank's element arrives within `code.relative_error` of its block's largest magnitude (two hops: and the
    sum over a host once more within that of its own block).  Sums are float32, in the order of the ranks.
    Raises ValueError naming the call if the tensors do not match.
    """
    inner, outer = groups or (group, None)
    hosts = 1 if groups is None else group_size(outer)
    places = group_size(inner)
    rank = (group_rank(outer) if hosts > 1 else 0) * places + group_rank(inner)
    _check_slices("reduce_scatter_quantized", label, input, hosts * places)
    checks.flat_pair("reduce_scatter_quantized", label, output, input, size=hosts * places, rank=rank)
    # (hosts, places, n) -> (places, hosts * n): the parts that each rank of this host sends on to all hosts
    parts = input.detach().view(hosts, places, -1).transpose(0, 1).reshape(places, -1)
    if feedback is not None:
        feedback.begin()
    first = _Hop.send(parts, inner, _Encoder(code, feedback, 0), async_op=async_op, label=label)

    def put(total: Tensor) -> None:
        output.detach().copy_(total)

    def finish() -> Handle:
        total = first.total()
        if hosts == 1:
            put(total)
            return DONE
        encoder = _Encoder(code, feedback, 1)
        second = _Hop.send(total.view(hosts, -1), outer, encoder, async_op=async_op, label=f"{label} between")
        return after(second.handle, lambda: put(second.total()))

    return _with_finish(first.handle, finish, async_op=async_op)


@final
@attrs.frozen(eq=False)
class _Encoder:
    """Code of the messages of one hop."""

    code: BlockCode
    feedback: ErrorFeedback | None
    hop: int

    def encode(self, values: Tensor, message: Tensor, receiver: int) -> None:
        if self.feedback is None:
            self.code.encode(values, message)
        else:
            self.feedback.encode(values, message, self.code, hop=self.hop, receiver=receiver)


@final
@attrs.frozen(eq=False)
class _Hop:
    """Parts in flight to the ranks of one group."""

    handle: Handle
    received: Tensor  # (size * bytes of a part,) uint8, by sender
    own: Tensor  # (numel of a part,) float32: this rank's own, not encoded
    rank: int
    code: BlockCode

    @classmethod
    def send(
        cls, parts: Tensor, group: ProcessGroup | None, encoder: _Encoder, *, async_op: bool, label: str
    ) -> _Hop:
        """parts: (size, n), one per receiver."""
        rank, code = group_rank(group), encoder.code
        own = parts[rank].to(torch.float32, copy=True)
        if parts.shape[0] == 1:
            return cls(DONE, own.new_empty(0, dtype=torch.uint8), own, rank, code)
        sent = torch.empty(parts.shape[0] * code.num_bytes(own.numel()), dtype=torch.uint8, device=own.device)
        for receiver, message in enumerate(sent.view(parts.shape[0], -1)):
            if receiver == rank:
                message.zero_()  # not read
            else:
                encoder.encode(parts[receiver], message, receiver)
        received = torch.empty_like(sent)
        handle = all_to_all(received, sent, group, async_op=async_op, label=label)
        return cls(handle, received, own, rank, code)

    def total(self) -> Tensor:
        """Sum over the senders, in their order; (n,) float32."""
        if not self.received.numel():
            return self.own
        total = torch.zeros_like(self.own)
        messages = self.received.view(-1, self.code.num_bytes(self.own.numel()))
        for sender, message in enumerate(messages):
            if sender == self.rank:
                total.add_(self.own)
            else:
                self.code.add(message, total)
        return total


def _with_finish(handle: Handle, finish: Callable[[], Handle | None], *, async_op: bool) -> Handle:
    work = after(handle, finish)
    if async_op:
        return work
    work.wait()
    return DONE


def _check_received(label: str, received: Tensor, num_bytes: int) -> None:
    """Raise unless `received` can hold the messages and its scales be read in place."""
    checks.dense("all_gather_quantized", label, "received", received)
    is_aligned = received.storage_offset() % 4 == 0
    if received.numel() != num_bytes or received.dtype is not torch.uint8 or not is_aligned:
        raise ValueError(
            f"{call_name('all_gather_quantized', label)}: received has {received.numel()} elements of "
            f"{received.dtype} at element {received.storage_offset()} of its storage; it must have {num_bytes} of "
            "torch.uint8, at a multiple of 4, because float32 scales are read there."
        )


def _check_slices(op: str, label: str, tensor: Tensor, size: int) -> None:
    """Raise unless `tensor` is floating-point and divides into `size` slices."""
    if not tensor.is_floating_point() or tensor.numel() % size:
        raise ValueError(
            f"{call_name(op, label)}: {tensor.numel()} elements of {tensor.dtype} cannot be quantized in {size} "
            f"slices; pass a floating-point tensor whose length is a multiple of {size}."
        )
