"""Tokens of all sequence ranks, for what is computed of the whole: a loss of each token, logits to look at."""

from __future__ import annotations

from torch import Tensor
from torch.distributed import ProcessGroup

from zpartition.cells import Cell
from zpartition.tensor.functions import gather_tokens

__all__ = ["gather_sequence"]


def gather_sequence(x: Tensor, group: ProcessGroup | None = None, dim: int = 1) -> Tensor:
    """The ranks' tokens along `dim`, joined in the order of the ranks.  Differentiable; collective of the group.

    Each rank has equally many.  A token's gradient is the sum of those that the ranks have for it: where all compute
    one loss of the whole, `size` times its own, which is what a mean over gradient ranks wants (losses.py).
    """
    return gather_tokens(x, Cell.of(group), dim % x.dim())
