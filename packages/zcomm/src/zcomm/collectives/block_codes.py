"""Block codes: 8- or 4-bit quantization with one scale per block, for weights and gradients in communication.

A block of consecutive elements shares one float32 scale, its largest magnitude / 127 (or / 7), and every element is
rounded to the nearest multiple of it.  The error of an element is at most half a scale: 1/254 (or 1/14) of the
largest magnitude *of its block*.  Blocks are short, so one outlier spoils 256 elements, not a tensor.

Values are converted to float32; values of a wider dtype beyond its range count as infinite, as in any cast.

A message is bytes: the codes of all blocks, then their scales.  One message instead of two is one collective instead
of two, and messages can be cut at rank boundaries.  Zeros are exact.  A block with an infinity or NaN gets a
non-finite scale and decodes to non-finite values, so the receiver sees the overflow, but not its element.

Rejected: an offset beside the scale (gradients and weights are centred; zero would not be exact); stochastic rounding
(a generator to keep equal on all ranks, against a bias that the scale per block makes small); the range -8..7 (its
extra code has no counterpart, so sums would drift).
"""

from __future__ import annotations

from typing import final

import attrs
import torch
from attrs.validators import in_
from torch import Tensor

__all__ = ["BlockCode"]

_SCALE_BYTES = 4
_CHUNK_NUMEL = 1 << 18  # elements processed at once: intermediate results stay in the cache
_SMALLEST = torch.finfo(torch.float32).tiny  # a smaller scale would underflow


def _multiple_of_8(_instance: object, _attribute: object, value: int) -> None:
    if value < 8 or value % 8:
        raise ValueError(f"block must be a positive multiple of 8 elements, got {value}.")


@final
@attrs.frozen(kw_only=True)
class BlockCode:
    """Code of floating-point elements as bytes (Dettmers et al. 2022; Wang et al. 2023, section 3.1)."""

    bits: int = attrs.field(default=8, validator=in_((4, 8)))  # per element
    block: int = attrs.field(default=256, validator=_multiple_of_8)  # elements that share a scale

    @property
    def levels(self) -> int:
        """Largest code; codes are -levels to levels."""
        return (1 << (self.bits - 1)) - 1

    @property
    def relative_error(self) -> float:
        """Largest error of a decoded element, relative to its block's largest magnitude: 1/254 or 1/14.

        In addition there is float32 rounding (2^-22 of the largest magnitude), 1e-38 absolutely, and the rounding of
        the dtype decoded into.
        """
        return 0.5 / self.levels

    @property
    def _largest_scale(self) -> float:
        """Upper limit of a scale: rounding of a finite magnitude could exceed it and decode to infinity."""
        return torch.finfo(torch.float32).max / self.levels * (1 - 2.0**-22)

    def num_bytes(self, numel: int) -> int:
        """Bytes of the message for `numel` elements; an incomplete last block is sent in full."""
        return self._num_blocks(numel) * (self.block * self.bits // 8 + _SCALE_BYTES)

    def encode(self, values: Tensor, out: Tensor | None = None) -> Tensor:
        """Encode `values` into messages: (..., num_bytes(n)) uint8, written into `out` if given.

        values: (..., n) of a floating-point dtype, on any device; each row becomes a message.
        """
        num_bytes = self.num_bytes(values.shape[-1])
        made = values.new_empty((*values.shape[:-1], num_bytes), dtype=torch.uint8) if out is None else out
        for row, message in self._rows(made, values.detach().contiguous()):
            for codes, scales, part in self._chunks(message, row):
                self._encode_chunk(part, codes, scales)
        return made

    def decode(self, message: Tensor, out: Tensor) -> Tensor:
        """Decode `message` into `out` and return `out`.

        message: (..., num_bytes(n)) uint8, contiguous; out: (..., n) contiguous, of a floating-point dtype.
        """
        for into, row in self._rows(message, out):
            for codes, scales, part in self._chunks(row, into):
                self._decode_chunk(codes, scales, part)
        return out

    def add(self, message: Tensor, total: Tensor) -> None:
        """Add the decoded elements of `message` to `total`; shapes as for `decode`."""
        for into, row in self._rows(message, total):
            for codes, scales, part in self._chunks(row, into):
                part.add_(self._decode_chunk(codes, scales, torch.empty_like(part)))

    # -- one row ---------------------------------------------------------------------------------

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _rows(self, message: Tensor, elements: Tensor) -> list[tuple[Tensor, Tensor]]:
        """(elements (n,), message) of each row."""
        numel = elements.shape[-1]
        num_bytes = self.num_bytes(numel)
        if message.dtype is not torch.uint8 or message.numel() * numel != elements.numel() * num_bytes:
            raise ValueError(
                f"a message of {self.bits} bits for {list(elements.shape)} elements is {num_bytes} bytes of "
                f"torch.uint8 a row; got {list(message.shape)} of {message.dtype}."
            )
        return list(zip(elements.detach().view(-1, numel), message.view(-1, num_bytes))) if numel else []

    def _chunks(self, message: Tensor, elements: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(codes (b, block * bits / 8) uint8, scales (b, 1) float32, elements (up to b * block,)) of each chunk."""
        blocks = self._num_blocks(elements.numel())
        codes = message[: blocks * self.block * self.bits // 8].view(blocks, -1)
        scales = message[codes.numel() :].view(torch.float32).view(blocks, 1)
        run = max(1, _CHUNK_NUMEL // self.block)
        starts = range(0, blocks, run)
        return [
            (codes[i : i + run], scales[i : i + run], elements[i * self.block :][: run * self.block]) for i in starts
        ]

    def _encode_chunk(self, values: Tensor, codes: Tensor, scales: Tensor) -> None:
        tail = codes.shape[0] * self.block - values.numel()
        whole = torch.nn.functional.pad(values.float(), (0, tail)) if tail else values.float()
        blocks = whole.view(-1, self.block)
        low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)  # NaN wins; aminmax is 15x as slow
        torch.maximum(-low, high, out=scales).div_(self.levels).clamp_(min=_SMALLEST)
        scales.masked_fill_((scales > self._largest_scale) & scales.isfinite(), self._largest_scale)
        numbers = torch.div(blocks, scales).round_().nan_to_num_(0.0, 0.0, 0.0).to(torch.int8)
        codes.copy_(numbers.view(torch.uint8) if self.bits == 8 else self._packed(numbers))

    def _decode_chunk(self, codes: Tensor, scales: Tensor, out: Tensor) -> Tensor:
        """Fill `out` (n,) and return it; skips the padding of a last block."""
        numbers = codes.view(torch.int8) if self.bits == 8 else self._unpacked(codes)
        if out.numel() == numbers.numel() and out.dtype is torch.float32:
            torch.mul(numbers, scales, out=out.view_as(numbers))
        else:
            out.copy_(torch.mul(numbers, scales).view(-1)[: out.numel()])
        return out

    def _packed(self, numbers: Tensor) -> Tensor:
        """Pack two codes per byte: the first half of a block in the low bits, the second in the high ones."""
        shifted = numbers.add_(self.levels + 1).view(torch.uint8)  # 1 to 15
        half = self.block // 2
        return torch.add(shifted[:, :half], shifted[:, half:], alpha=16)

    def _unpacked(self, codes: Tensor) -> Tensor:
        halves = torch.cat((codes & 15, codes >> 4), dim=1)
        return halves.view(torch.int8).sub_(self.levels + 1)
