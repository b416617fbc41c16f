"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: sequence parallelism for Transformers, and tiled computation.

`register_with_transformers` replaces an attention function of Transformers by `zpartition.sequence.ModelAttention`,
for all models of the process, and returns the groups as an `mpu` for `initialize`.  `unregister` undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn

import zcomm
from zengine.deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
from zengine.deepspeed.runtime.sequence_parallel.registry import config_of, register_attention, restore_attentions
from zengine.deepspeed.runtime.sequence_parallel.tiled_compute import (
    SequenceTiledCompute,
    TiledFusedLogitsLoss,
    TiledMLP,
    sequence_tiled_compute,
)
from zpartition import sequence

__all__ = [
    "SequenceTiledCompute",
    "TiledFusedLogitsLoss",
    "TiledMLP",
    "UlyssesSPAttentionHF",
    "UlyssesSPDataLoaderAdapter",
    "sequence_tiled_compute",
]


@final
class UlyssesSPAttentionHF(nn.Module):
    """Sequence-parallel attention for Transformers; usually made by `register_with_transformers`."""

    def __init__(
        self,
        attn: Any,
        batch_size: int,
        attn_head_count: int,
        attn_head_size: int,
        kv_head_count: int,
        num_hidden_layers: int,
        process_group: Any,
        seq_length_is_variable: bool = False,
        local_seq_length: int | None = None,
        global_seq_length: int | None = None,
        disable_in_eval: bool = False,
    ) -> None:
        """attn: `(module, query, key, value, mask, **options) -> (output, weights)`, like "sdpa".

        Sizes come from the tensors; only the numbers of heads are checked here.
        Raises ValueError if the heads cannot be assigned to the ranks.
        """
        super().__init__()
        sequence.HeadAssignment(attn_head_count, kv_head_count, zcomm.group_size(process_group))
        self.attn = sequence.ModelAttention.over(attn, "sdpa", process_group, disable_in_eval=disable_in_eval)

    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return (output (batch, tokens, width of all heads), None)."""
        out, weights = self.attn(module, query, key, value, attention_mask, **kwargs)
        return out.flatten(2), weights

    @classmethod
    def register_with_transformers(
        cls,
        model_name_or_path: Any,
        core_attn_implementation: str,
        sequence_parallel_size: int,
        micro_batch_size: int,
        seq_length: int | None = None,
        seq_length_is_variable: bool = True,
        disable_in_eval: bool = False,
        max_length: int | None = None,
    ) -> zcomm.Groups | None:
        """Make models with this attention sequence-parallel; return the `mpu`, or None for a size of 1.

        model_name_or_path: a model, or the name or path of one; its numbers of heads are checked.
        core_attn_implementation: the attention of the model: "sdpa", "flex_attention", a flash attention.
        seq_length (max_length in older releases): tokens of a whole sequence, if all are equal; checked.
        disable_in_eval: modules in eval mode get whole sequences.

        Raises ValueError, before communication, if heads or tokens cannot be split, or for another attention.
        """
        if sequence_parallel_size == 1:
            return None
        config, loaded = config_of(model_name_or_path)
        length = seq_length or max_length
        if not seq_length_is_variable and length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length=, the tokens of a whole sequence.")
        if loaded and loaded != core_attn_implementation:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}, but the model was loaded with "
                f"attn_implementation={loaded!r}: use the same for both."
            )
        heads = config.num_attention_heads
        sequence.HeadAssignment(heads, getattr(config, "num_key_value_heads", None) or heads, sequence_parallel_size)
        if length is not None:
            sequence.Split(sequence_parallel_size).check(length, "seq_length")
        groups = initialize_sequence_parallel(sequence_parallel_size)
        register_attention(core_attn_implementation, groups.sequence(), disable_in_eval=disable_in_eval)
        return groups

    @staticmethod
    def unregister() -> None:
        """Restore the attention functions of Transformers."""
        restore_attentions()


@final
class UlyssesSPDataLoaderAdapter:
    """Wraps a loader whose batches differ between sequence ranks: this rank's shard of each rank's batch in turn.

    After `sp_world_size` shards every rank has processed its part of that many batches.  `labels` become
    `shift_labels`.  Other attributes are the loader's (`set_epoch`, `dataset`).
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """Wrap `dl`.  sp_rank, sp_world_size: must match the group.  device: ignored; shards stay in place.

        Raises ValueError if the group has another size or rank.
        """
        found = zcomm.group_rank(sp_group), zcomm.group_size(sp_group)
        if (sp_rank, sp_world_size) != found:
            raise ValueError(
                f"sp_rank={sp_rank}, sp_world_size={sp_world_size}, but this is rank {found[0]} of {found[1]} of "
                "sp_group."
            )
        self.dl = dl
        self._batches = sequence.ExchangedBatches.over(dl, sp_group)
        self._shards: Iterator[dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Return the shards of an epoch."""
        return len(self._batches)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """Return the next shard; StopIteration ends an epoch, and the next call begins another."""
        if self._shards is None:
            self._shards = iter(self._batches)
        try:
            return next(self._shards)
        except BaseException:
            self._shards = None
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)
