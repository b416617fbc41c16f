"""`deepspeed.runtime.sequence_parallel.ulysses_sp`: sequences over ranks for Transformers, and tiled computation.

`register_with_transformers` puts a `zpartition.sequence.ModelAttention` where Transformers looks an attention up, for
all models of the process, and returns the groups as an `mpu` for `initialize`.  `unregister` undoes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

from torch import Tensor, nn

import zcomm
from zengine.deepspeed.runtime.sequence_parallel.parallel_state_sp import initialize_sequence_parallel
from zengine.deepspeed.runtime.sequence_parallel.registry import config_of, put, restore
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
    """An attention of Transformers over shared-out sequences; most will want `register_with_transformers`."""

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
        """attn: `(module, query, key, value, mask, **options) -> (output, weights)`, as "sdpa" is.

        The sizes are read of the tensors; the number of heads is checked here.
        Raises ValueError if heads cannot be shared out.
        """
        super().__init__()
        sequence.HeadAssignment(attn_head_count, kv_head_count, zcomm.group_size(process_group))
        self.attn = sequence.ModelAttention.over(attn, "sdpa", process_group, disable_in_eval=disable_in_eval)

    def forward(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        """(output (batch, tokens, width of all heads), None)."""
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
        """Let models with this attention train on pieces of sequences; returns the `mpu`, None for a size of 1.

        model_name_or_path: a model, or the name or path of one, whose heads are checked.
        core_attn_implementation: what the model was loaded with: "sdpa", "flex_attention", a flash attention.
        seq_length (or max_length, its old name): tokens of a whole sequence where all have equally many; checked.
        disable_in_eval: modules in evaluation get whole sequences.

        Raises ValueError, before any message, if heads or tokens cannot be shared out, or for another attention.
        """
        if sequence_parallel_size == 1:
            return None
        config, loaded = config_of(model_name_or_path)
        length = seq_length or max_length
        if not seq_length_is_variable and length is None:
            raise ValueError("seq_length_is_variable=False needs seq_length=, tokens of a whole sequence.")
        if loaded and loaded != core_attn_implementation:
            raise ValueError(
                f"core_attn_implementation={core_attn_implementation!r}, but the model was loaded with "
                f"attn_implementation={loaded!r}: give both the same."
            )
        heads = config.num_attention_heads
        sequence.HeadAssignment(heads, getattr(config, "num_key_value_heads", None) or heads, sequence_parallel_size)
        if length is not None:
            sequence.Split(sequence_parallel_size).check(length, "seq_length")
        groups = initialize_sequence_parallel(sequence_parallel_size)
        put(core_attn_implementation, groups.sequence(), disable_in_eval=disable_in_eval)
        return groups

    @staticmethod
    def unregister() -> None:
        """Let the attentions of Transformers be what they were."""
        restore()


@final
class UlyssesSPDataLoaderAdapter:
    """Around a loader that gives each sequence rank other batches: pieces of all of them, one after the other.

    After `sp_world_size` pieces everybody has done their part of as many batches.  `labels` become `shift_labels`.
    What else is asked is the loader's own (`set_epoch`, `dataset`).
    """

    def __init__(self, dl: Any, sp_rank: int, sp_group: Any, sp_world_size: int, device: Any) -> None:
        """sp_rank, sp_world_size: as the group has them.  device: accepted; pieces stay where the batches are.

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
        self._pieces: Iterator[dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Pieces of an epoch."""
        return len(self._batches)

    def __iter__(self) -> UlyssesSPDataLoaderAdapter:
        return self

    def __next__(self) -> dict[str, Any]:
        """The next piece; after the last of an epoch StopIteration, and then those of another one."""
        if self._pieces is None:
            self._pieces = iter(self._batches)
        try:
            return next(self._pieces)
        except BaseException:
            self._pieces = None
            raise

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dl":
            raise AttributeError(name)
        return getattr(self.dl, name)
