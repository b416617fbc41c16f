"""Phases of a compressed all-reduce on one rank: what is encoded, kept and decoded (compressed.py).

`SignPhases` has the law of scales and the layout of messages; a subclass has the elements.  `TorchPhases` works on
every device; on a CPU with the compiled extension sign_kernels.py takes its place.  The codes and the errors of both
follow from scales in the same way, bit for bit; scales agree to the rounding of a sum of squares, which torch adds in
float32 and the kernel in float64.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zcomm import compat
from zcomm.collectives.sign_codes import ROW, pack_bits, rows_of
from zcomm.collectives.sign_layout import SignLayout, Tables

__all__ = ["SignPhases", "TorchPhases"]

_CHUNK_ROWS = 1 << 15  # rows processed at once: intermediate results stay in the cache


class SignPhases:
    """Phases of rank `rank`.  A message has scales first, then one byte for eight elements of a span."""

    def __init__(self, layout: SignLayout, rank: int, device: torch.device) -> None:
        """Allocate errors of 0; none for one rank."""
        self.layout, self.rank, self.device = layout, rank, device
        self.tables = Tables.of(layout, device)
        self.header_bytes, self.message_bytes = layout.header_bytes, layout.message_bytes  # scales; the whole message
        alone = layout.size == 1
        self.worker = torch.zeros(0 if alone else layout.size * layout.span_numel, device=device)
        self.server = torch.zeros(0 if alone else layout.span_numel, device=device)

    # -- elements, by a subclass -------------------------------------------------------------------

    def encode_worker(self, buffers: Sequence[Tensor], messages: Tensor) -> None:
        """Add buffers to the worker's error, encode, keep the new error.  messages: (ranks, bytes) uint8, of 0."""
        raise NotImplementedError

    def encode_server(self, received: Tensor, message: Tensor) -> None:
        """Add the mean of `received` to the server's error, encode, keep the new error.

        received: (ranks, bytes).  message: (bytes,), overwritten.
        """
        raise NotImplementedError

    def decode(self, gathered: Tensor, buffers: Sequence[Tensor]) -> None:
        """Write values into buffers, and 0 into their padding.  gathered: (ranks, bytes)."""
        raise NotImplementedError

    def settle(self) -> None:
        """Let `worker` and `server` be the errors."""

    # -- scales ------------------------------------------------------------------------------------

    def worker_scales(self, squares: Tensor) -> Tensor:
        """Return scales by piece, float32, from sums of squares by piece, float64."""
        tables = self.tables
        sums = with_zero(squares)[tables.pieces_of].sum(1)
        return (sums.sqrt().float() / tables.tensor_roots)[tables.tensor_of]

    def server_scales(self, squares: Tensor) -> Tensor:
        """Return scales by piece, float32, 0 for those of other owners, from the squares of this rank's pieces."""
        tables = self.tables
        own = tables.of_owner[self.rank]
        lengths, roots = squares.sqrt().float(), tables.piece_roots[own]
        if self.layout.fused:
            lengths, roots = squares.sum().sqrt().float(), roots.double().norm().float()
        scales = torch.zeros(len(tables.views), device=self.device)
        scales[own] = lengths / roots
        return scales

    def write_scales(self, message: Tensor, owner: int, scales: Tensor) -> None:
        """Write the scales of an owner's pieces into a message.  scales: by piece, with the 0 of padding."""
        message[: self.header_bytes].view(torch.float32).copy_(scales[self.tables.slots[owner]])

    def scales_of(self, message: Tensor, owner: int) -> Tensor:
        """Return the scales in a message by piece: (pieces + 1,) float32, new; 0 for those of other owners."""
        scales = torch.zeros(len(self.tables.views) + 1, device=self.device)
        scales[self.tables.slots[owner]] = message[: self.header_bytes].view(torch.float32)
        return scales  # padding of the message is 0

    def _codes_of(self, message: Tensor) -> Tensor:
        """Return the codes in a message or in the rows of a matrix of messages."""
        return message[..., self.header_bytes :][..., : self.layout.span_numel // ROW]


class TorchPhases(SignPhases):
    """Phases with torch's operations."""

    def __init__(self, layout: SignLayout, rank: int, device: torch.device) -> None:
        super().__init__(layout, rank, device)
        start, own = rank * layout.span_numel, self.tables.of_owner[rank]
        views = () if layout.size == 1 else self.tables.views
        self._worker_views = [self.worker[view] for view in views]
        self._server_views = [self.server[view.start - start : view.stop - start] for view in views[own]]

    def encode_worker(self, buffers: Sequence[Tensor], messages: Tensor) -> None:
        size = self.layout.size
        compat.foreach_add_(self._parts(self.worker.view(size, -1)), [buffer.view(size, -1) for buffer in buffers])
        scales = self.worker_scales(self._squares(self._worker_views))
        for owner, part in enumerate(self.worker.view(size, -1)):
            self._encode(part, owner, scales, messages[owner])

    def encode_server(self, received: Tensor, message: Tensor) -> None:
        size, rows = self.layout.size, self.layout.span_numel // ROW
        own_rows = self._rows_of(self.rank)
        scales = [self.scales_of(each, self.rank).div_(size) for each in received]
        codes = [self._codes_of(each) for each in received]
        for begin in range(0, rows, _CHUNK_ROWS):
            chunk = slice(begin, begin + _CHUNK_ROWS)
            index = own_rows[chunk]
            total = rows_of(codes[0][chunk]).mul_(scales[0][index].unsqueeze(1))
            for source in range(1, size):
                total.addcmul_(rows_of(codes[source][chunk]), scales[source][index].unsqueeze(1))
            self.server.view(rows, ROW)[chunk].add_(total)
        self._clear_tails(self.server, self.rank)
        self._encode(self.server, self.rank, self.server_scales(self._squares(self._server_views)), message)

    def decode(self, gathered: Tensor, buffers: Sequence[Tensor]) -> None:
        size, rows = self.layout.size, self.layout.span_numel // ROW
        for owner, message in enumerate(gathered):
            scales, codes, index = self.scales_of(message, owner), self._codes_of(message), self._rows_of(owner)
            part = torch.empty(rows, ROW, device=self.device)
            for begin in range(0, rows, _CHUNK_ROWS):
                chunk = slice(begin, begin + _CHUNK_ROWS)
                torch.mul(rows_of(codes[chunk]), scales[index[chunk]].unsqueeze(1), out=part[chunk])
            flat = part.view(-1)
            self._clear_tails(flat, owner)
            compat.foreach_copy_([buffer.view(size, -1)[owner] for buffer in buffers], self._parts(flat))

    def _squares(self, pieces: list[Tensor]) -> Tensor:
        """Return the sums of squares of pieces: (pieces,) float64."""
        norms = torch.stack(compat.foreach_norm(pieces)) if pieces else self.server.new_zeros(0)
        return norms.double().square()

    def _encode(self, part: Tensor, owner: int, scales: Tensor, message: Tensor) -> None:
        """Write signs and scales of `part`, the workspace of `owner`, into `message`; leave the error in `part`.

        scales: (pieces,).
        """
        rows = self.layout.span_numel // ROW
        scales, codes = with_zero(scales), self._codes_of(message)
        self.write_scales(message, owner, scales)
        piece_of, values = self._rows_of(owner), part.view(rows, ROW)
        for first in range(0, rows, _CHUNK_ROWS):
            chunk = slice(first, first + _CHUNK_ROWS)
            bits = values[chunk] >= 0
            codes[chunk] = pack_bits(bits)
            own = scales[piece_of[chunk]].unsqueeze(1)
            values[chunk].sub_(torch.where(bits, own, -own))
        self._clear_tails(part, owner)

    def _rows_of(self, owner: int) -> Tensor:
        """Return the piece of each row of an owner's span."""
        rows = self.layout.span_numel // ROW
        return self.tables.piece_of[owner * rows :][:rows]

    def _parts(self, spans: Tensor) -> list[Tensor]:
        """Split the last dimension, a span of all buffers, by buffer."""
        return list(torch.split(spans, [buffer.numel // self.layout.size for buffer in self.layout.buffers], dim=-1))

    def _clear_tails(self, part: Tensor, owner: int) -> None:
        """Set the padding in last rows to 0.  part: (span,), of `owner`."""
        part.index_fill_(0, self.tables.tails[owner], 0.0)


def with_zero(values: Tensor) -> Tensor:
    """Append a 0, for padding."""
    return torch.cat([values, values.new_zeros(1)])
