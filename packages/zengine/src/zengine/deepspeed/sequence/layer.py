"""`deepspeed.sequence.layer`: DistributedAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from zpartition import sequence

__all__ = ["DistributedAttention"]


@final
class DistributedAttention(nn.Module):
    """`zpartition.sequence.DistributedAttention` with the index of the batch dim instead of the token dim."""

    def __init__(
        self,
        local_attention: Callable[..., Any],
        sequence_process_group: ProcessGroup | None,
        scatter_idx: int = 2,
        gather_idx: int = 0,
        sp_stream: Any = None,
    ) -> None:
        """Wrap `local_attention`.  sp_stream: ignored; query, key and value are sent in one message."""
        super().__init__()
        self.local_attn = local_attention
        self.spg = sequence_process_group
        self.scatter_idx, self.gather_idx = scatter_idx, gather_idx

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Attend over (tokens, batch, heads, width) with batch_dim_idx=1, or (batch, tokens, ...) with 0.

        Raises ValueError if the heads cannot be assigned to the ranks, or for another batch_dim_idx.
        """
        if batch_dim_idx not in (0, 1):
            raise ValueError(
                f"batch_dim_idx must be 0 (batch, tokens, ...) or 1 (tokens, batch, ...), got {batch_dim_idx}"
            )
        tokens = 1 - batch_dim_idx if batch_dim_idx == self.gather_idx else self.gather_idx
        attention = sequence.DistributedAttention(self.local_attn, self.spg, self.scatter_idx, tokens)
        attended: Tensor = attention(query, key, value, *args, **kwargs)
        return attended
