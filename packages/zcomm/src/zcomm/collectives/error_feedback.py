"""Error feedback for quantized sums: what a code loses in one message is added to the next (LoCo: Xie et al. 2024).

With error e, a message of the values g carries q = code(g + e), and the error becomes a moving average of what the
code lost:

    e <- beta * e + (1 - beta) * (g + e - decoded(q))

A gradient that rounds to zero in each step is lost without feedback, however often it comes; with it the mean of the
decoded messages approaches the mean of the gradients, since their difference is the change of e over all steps,
divided by 1 - beta and by the number of steps.  The average damps the error, which otherwise follows each message's
rounding; and every `reset_every` reductions it starts from zero, because errors of old weights mislead.

Errors are kept in 8 bits (arXiv 2407.04480, section 3): one byte an element of what is sent, instead of four.  They
belong to one rank, to one message of it, and to the present weights, so they are not part of a checkpoint.

Rejected: errors in the dtype of the gradients (at stage 3 they would take the memory that sharding saves); one scale
for all messages (a message's magnitude follows its layer).
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from zcomm.collectives.block_codes import BlockCode

__all__ = ["ErrorFeedback"]

_STORED = BlockCode(bits=8)  # of errors between two messages


@final
class ErrorFeedback:
    """Errors of this rank's messages in one repeated reduction.

    beta: weight of the past in the moving average, at least 0 and below 1.
    reset_every: number of reductions after which errors are cleared.

    Raises:
        ValueError: another beta, or `reset_every` below 1.
    """

    def __init__(self, *, beta: float = 0.8, reset_every: int = 1024) -> None:
        if not 0 <= beta < 1:
            raise ValueError(f"beta = {beta}: the weight of past errors must be at least 0, and below 1.")
        if reset_every < 1:
            raise ValueError(f"reset_every = {reset_every}: clear errors after 1 reduction or more.")
        self.beta, self.reset_every = beta, reset_every
        self._num_reductions = 0
        self._errors: dict[tuple[int, int], tuple[int, Tensor]] = {}  # by hop and receiver: elements, encoded

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored errors."""
        return sum(stored.numel() for _, stored in self._errors.values())

    def begin(self) -> None:
        """Begin a reduction; clears the errors in the first of every `reset_every`."""
        if self._num_reductions % self.reset_every == 0:
            self._errors.clear()
        self._num_reductions += 1

    def reset(self) -> None:
        """Clear the errors, and begin to count anew."""
        self._errors.clear()
        self._num_reductions = 0

    def scale(self, factor: float) -> None:
        """Multiply the errors, after the values of all later messages were multiplied."""
        for numel, stored in self._errors.values():
            _STORED.encode(_STORED.decode(stored, _like(stored, numel)).mul_(factor), stored)

    def encode(self, values: Tensor, message: Tensor, code: BlockCode, *, hop: int, receiver: int) -> None:
        """Encode `values` and the error of the last message for `receiver` into `message`; keep the new error.

        values: (n,) of a floating-point dtype.  message: (code.num_bytes(n),) uint8.
        A block that is not finite stays so in the message, and leaves no error.
        """
        sent = values.to(torch.float32, copy=True)
        known = self._errors.get((hop, receiver))
        error = torch.zeros_like(sent) if known is None else _STORED.decode(known[1], torch.empty_like(sent))
        code.encode(sent.add_(error), message)
        lost = sent.sub_(code.decode(message, torch.empty_like(sent)))
        error.mul_(self.beta).add_(lost, alpha=1 - self.beta).nan_to_num_(0.0, 0.0, 0.0)
        self._errors[hop, receiver] = sent.numel(), _STORED.encode(error, None if known is None else known[1])

    @staticmethod
    def stored_bytes(numel: int) -> int:
        """Return the bytes of the errors of one message of `numel` elements."""
        return _STORED.num_bytes(numel)


def _like(stored: Tensor, numel: int) -> Tensor:
    return torch.empty(numel, dtype=torch.float32, device=stored.device)
