"""`deepspeed.sequence.fpdt_layer`: inputs of fully pipelined distributed attention (Yao et al. 2024).

Its attention moves chunks between a GPU's memory and the host around flash-attention's kernels; it is not available.
`zpartition.sequence.ring_attention`, and offloaded activation checkpoints, serve long sequences.
"""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from zengine.deepspeed.absent import absent

__all__ = ["FPDT_FFN", "FPDT_Attention", "FPDT_InputConstruct", "FPDT_LogitsLoss", "update_out_and_lse"]

FPDT_Attention = absent("sequence.fpdt_layer.FPDT_Attention")
FPDT_FFN = absent("sequence.fpdt_layer.FPDT_FFN")
FPDT_LogitsLoss = absent("sequence.fpdt_layer.FPDT_LogitsLoss")
_FPDTGPUAttentionImpl_ = absent("sequence.fpdt_layer._FPDTGPUAttentionImpl_")
_FPDTGPUOffloadingAttentionImpl_ = absent("sequence.fpdt_layer._FPDTGPUOffloadingAttentionImpl_")


def update_out_and_lse(
    out: Tensor | None, lse: Tensor | None, block_out: Tensor, block_lse: Tensor, slice_: Any = None
) -> tuple[Tensor, Tensor]:
    """Merge the attention over a block of keys into that over the blocks before it.

    out: (batch, tokens, heads, width) float32; lse: (batch, tokens, heads, 1); None both for the first block.
    block_out: as out; block_lse: (batch, heads, tokens).
    slice_: part of `out` and `lse` to update, in place.

    Raises ValueError for a slice of the first block.
    """
    weight = block_lse.transpose(1, 2).unsqueeze(-1)
    if out is None or lse is None:
        if slice_ is not None:
            raise ValueError("the first block has no slice_")
        return block_out.float(), weight.contiguous()
    before, old = (out, lse) if slice_ is None else (out[slice_], lse[slice_])
    new = torch.logaddexp(old, weight)
    merged = torch.exp(old - new) * before + torch.exp(weight - new) * block_out.float()
    if slice_ is None:
        return merged, new
    out[slice_], lse[slice_] = merged, new
    return out, lse


@final
class FPDT_InputConstruct(nn.Module):  # noqa: N801  DeepSpeed's name
    """This sequence rank's part of a batch: chunk r, r + size, r + 2 * size, ... of each sequence.

    So every rank has early and late tokens, and equal work in causal attention.
    """

    def __init__(
        self,
        tokens: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        attention_mask: Any,
        position_ids: Tensor | None,
        args: Any,
        sp_size: int,
        sp_rank: int,
    ) -> None:
        """Take whole sequences, (batch, tokens).

        args: has ds_sequence_parallel_fpdt_chunk_size, tokens of one chunk of all ranks.

        Raises ValueError if the tokens do not divide.
        """
        super().__init__()
        length, chunk = tokens.shape[1], int(args.ds_sequence_parallel_fpdt_chunk_size)
        if length % sp_size or length % chunk or chunk % sp_size:
            raise ValueError(
                f"{length} tokens must be a multiple of the chunk size, {chunk}, and that of {sp_size} sequence ranks"
            )
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.num_chunk_per_gpu, self.chunk_size = length // chunk, chunk // sp_size
        self.sp_size, self.sp_rank = sp_size, sp_rank
        self.global_seq_len, self.local_seq_len, self.batch_size = length, length // sp_size, tokens.shape[0]
        self.device = tokens.device

    def generate(self) -> tuple[Any, ...]:
        """Return tokens, labels, loss mask, attention mask and positions.

        The loss mask has the tokens of all ranks, rank by rank; the attention mask is unchanged; the others are this
        rank's.
        """
        places = torch.arange(self.global_seq_len, device=self.device)
        order = places.view(self.num_chunk_per_gpu, self.sp_size, self.chunk_size).transpose(0, 1)
        mine = order[self.sp_rank].flatten()
        tokens, labels, positions = (
            None if each is None else each[:, mine] for each in (self.tokens, self.labels, self.position_ids)
        )
        loss_mask = None if self.loss_mask is None else self.loss_mask[:, order.flatten()]
        return tokens, labels, loss_mask, self.attention_mask, positions
