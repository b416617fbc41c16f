"""Compressed all-reduce: the mean over ranks of 1-bit tensors with error feedback (Tang et al. 2021, 1-bit Adam).

Every rank sends the sign of each element and one scale a tensor.  What the code loses stays on the rank that lost it
and is added next time, so the mean *over calls* is right although a single one is coarse.  Two phases:

1. Worker: b = x + e; scale s = ||b|| / sqrt(n), sign(0) = +1; e = b - s sign(b).  One all_to_all sends every rank the
   signs and scales of its span.
2. Server, the owner of a span: m = the mean of what arrived + its own error; scale over each part of a tensor in the
   span; error = m - s sign(m).  One all_gather sends signs and scales back, and all ranks decode the same bits.

A phase is one message for all tensors, scales first.  A rank sends 2 N / 8 (n - 1) / n bytes and a few scales,
against 2 * 4 N (n - 1) / n of an all-reduce in float32.

Tensors lie in flat *buffers*, which are cut into equal spans, one a rank, as the buckets of ZeRO are: rank r owns
span r of each buffer.  `SignLayout` says where.  The workspace, in which errors live, is ordered by owner, so that
what one rank receives is contiguous.  Rows of eight elements are one byte of a message and have one scale: a part of
a tensor begins at a multiple of eight.

Padding is not a part of a tensor: it has no influence on scales, stays 0, and collects no error.  DeepSpeed divides
by the padded length instead, which halves the scale of 4 elements padded to 16; `padded=True` does so, too.

Values must be finite; an infinity makes the errors of its tensor infinite.  Everything is deterministic.

Rejected: a message for each tensor (latency, two for each of hundreds of tensors); scales for blocks of elements
(more bytes than the signs for short blocks, and another law than the published one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from zcomm import compat
from zcomm.collectives.sign_kernels import phases_for
from zcomm.collectives.sign_layout import SignLayout
from zcomm.collectives.verbs import all_gather, all_to_all, group_rank, group_size

__all__ = ["CompressedAllReduce", "SignLayout"]


@final
class CompressedAllReduce:
    """Replaces tensors by their mean over the ranks of `group`, sent in one bit an element.

    The errors are its state: `worker_error` (ranks * span,) and `server_error` (span,), float32, in the order of the
    workspace.  They belong to this rank, this layout and this number of ranks.  In a world of one there are none,
    and means are the tensors themselves.
    """

    def __init__(
        self,
        layout: SignLayout,
        group: ProcessGroup | None = None,
        *,
        device: torch.device | str = "cpu",
        label: str = "compressed mean",
    ) -> None:
        """Allocate errors.  Raises ValueError if `group` has another number of ranks than `layout`."""
        if group_size(group) != layout.size:
            raise ValueError(
                f"the layout is for {layout.size} ranks, the group has {group_size(group)}; make it with "
                "size=zcomm.group_size(group)."
            )
        self.layout, self.group, self.label = layout, group, label
        self.rank = group_rank(group)
        self.device = torch.device(device)
        self.latest = torch.zeros(0, dtype=torch.uint8, device=self.device)  # the last result, encoded
        self._phases = phases_for(layout, self.rank, self.device)

    @property
    def message_bytes(self) -> int:
        """Bytes that one rank sends to another in each phase."""
        return self._phases.message_bytes

    @property
    def worker_error(self) -> Tensor:
        """What the worker has not sent: (ranks * span,) float32; may be written in place until the next call."""
        self._phases.settle()
        return self._phases.worker

    @property
    def server_error(self) -> Tensor:
        """What the server has not sent: (span,) float32; may be written in place until the next call."""
        self._phases.settle()
        return self._phases.server

    def reset(self) -> None:
        """Forget all errors and the last result."""
        self.worker_error.zero_()
        self.server_error.zero_()
        self.latest = self.latest.new_empty(0)

    def mean(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the mean over ranks; a collective.

        tensors: in the order of the layout, of its lengths, of any shape and floating-point dtype.
        Raises ValueError for tensors that do not fit.
        """
        found = [tensor.numel() for tensor in tensors]
        wanted = [numel for _, _, numel in self.layout.tensors]
        if found != wanted:
            raise ValueError(f"{self.label}: got tensors of {found[:8]} elements; the layout has {wanted[:8]}.")
        buffers = [torch.zeros(buffer.numel, device=self.device) for buffer in self.layout.buffers]
        views = [
            buffers[index][begin : begin + numel].view(tensor.shape)
            for tensor, (index, begin, numel) in zip(tensors, self.layout.tensors)
        ]
        with torch.no_grad():
            compat.foreach_copy_(views, list(tensors))
            self.mean_buffers(buffers)
            compat.foreach_copy_(list(tensors), views)

    @torch.no_grad()
    def mean_buffers(self, buffers: Sequence[Tensor]) -> None:
        """Replace flat buffers, whose padding is 0, by the mean over ranks; a collective.

        buffers: by index, contiguous, (numel,) of a floating-point dtype.
        Raises ValueError for buffers that do not fit.
        """
        self._check(buffers)
        size = self.layout.size
        if size == 1:
            return
        sent = torch.zeros(size, self.message_bytes, dtype=torch.uint8, device=self.device)
        self._phases.encode_worker(buffers, sent)
        received = torch.empty_like(sent)
        all_to_all(received.view(-1), sent.view(-1), self.group, label=self.label)
        own = sent[self.rank]
        self._phases.encode_server(received, own)
        gathered = sent.new_empty(size * self.message_bytes)
        all_gather(gathered, own.contiguous(), self.group, label=self.label)
        self.latest = gathered
        self.decode_latest(buffers)

    @torch.no_grad()
    def decode_latest(self, buffers: Sequence[Tensor]) -> None:
        """Write the last result into `buffers` again.  Raises ValueError if there is none (also after `reset`)."""
        self._check(buffers)
        if not self.latest.numel():
            raise ValueError(f"{self.label}: there is no result yet; call mean() first.")
        self._phases.decode(self.latest.view(self.layout.size, -1), buffers)

    def _check(self, buffers: Sequence[Tensor]) -> None:
        found = [tuple(buffer.shape) for buffer in buffers]
        wanted = [(buffer.numel,) for buffer in self.layout.buffers]
        if found != wanted:
            raise ValueError(f"{self.label}: got buffers of shapes {found[:8]}; the layout has {wanted[:8]}.")
